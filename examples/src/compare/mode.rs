//! Ways to train the same model.

use std::fmt;
use std::str::FromStr;

use collectives::{Algorithm, Choice};
use zero::Stage;

use crate::ConfigError;

/// One way to train, as `--modes` names it.
#[derive(Debug, Clone, PartialEq)]
pub enum Mode {
    /// A plain Burn loop on one thread.
    Single,
    /// Data-parallel, all-reducing as chosen.
    Ddp(Choice),
    /// Sharded by a stage of ZeRO, all collectives as chosen, and every sum in the one order. In
    /// text the ring goes without saying: it moves what the stage's formula says, where a tree moves
    /// more to scatter and to gather.
    Zero(Stage, Choice),
}

/// What a mode of ranks comes down to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Way<'a> {
    pub(super) stage: Option<Stage>,
    pub(super) choice: &'a Choice,
}

/// Data-parallel by the tree: the one order of sums, at every world size.
pub(super) const TREE: Way<'static> = Way {
    stage: None,
    choice: &Choice::Fixed(Algorithm::Tree),
};

impl Way<'_> {
    pub(super) fn is_tree(self) -> bool {
        self.stage.is_none() && self.choice == TREE.choice
    }
}

impl Mode {
    /// Reads the modes that the settings name.
    ///
    /// # Errors
    /// [`ConfigError::Value`] for a name that is none, or for no name at all.
    ///
    /// ```
    /// use examples::{Mode, Settings};
    ///
    /// let modes = Mode::read(&Settings::compare().compare.modes)?;
    /// assert_eq!(modes[0], Mode::Single);
    /// # Ok::<(), examples::ConfigError>(())
    /// ```
    pub fn read(names: &[String]) -> Result<Vec<Self>, ConfigError> {
        match names {
            [] => "".parse().map(|mode| vec![mode]),
            _ => names.iter().map(|name| name.parse()).collect(),
        }
    }

    pub(crate) fn stage(&self) -> Option<Stage> {
        match self {
            Self::Single | Self::Ddp(_) => None,
            Self::Zero(stage, _) => Some(*stage),
        }
    }

    /// None for the single process.
    pub(super) fn way(&self) -> Option<Way<'_>> {
        match self {
            Self::Single => None,
            Self::Ddp(choice) | Self::Zero(_, choice) => Some(Way {
                stage: self.stage(),
                choice,
            }),
        }
    }
}

impl FromStr for Mode {
    type Err = ConfigError;

    /// ```
    /// use collectives::{Algorithm, Choice};
    /// use examples::Mode;
    /// use zero::Stage;
    ///
    /// let mode: Mode = "ddp:ring".parse()?;
    /// assert_eq!(mode, Mode::Ddp(Choice::Fixed(Algorithm::Ring)));
    /// assert!("ddp:star".parse::<Mode>().is_err());
    /// let mode: Mode = "zero:2".parse()?;
    /// assert_eq!(mode, Mode::Zero(Stage::Two, Choice::Fixed(Algorithm::Ring)));
    /// let mode: Mode = "zero:3:tree".parse()?;
    /// assert_eq!(mode, Mode::Zero(Stage::Three, Choice::Fixed(Algorithm::Tree)));
    /// # Ok::<(), examples::ConfigError>(())
    /// ```
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let parts: Vec<&str> = text.split(':').collect();
        let choice = |name: &str| Choice::from_str(name).ok();
        let stage = |number: &str| Stage::try_from(number.parse::<u8>().ok()?).ok();
        let mode = match parts[..] {
            ["single"] => Some(Self::Single),
            ["ddp", name] => choice(name).map(Self::Ddp),
            ["zero", number] => stage(number).map(|stage| Self::Zero(stage, USUAL)),
            ["zero", number, name] => {
                let pair = stage(number).zip(choice(name));
                pair.map(|(stage, choice)| Self::Zero(stage, choice))
            }
            _ => None,
        };
        mode.ok_or_else(|| ConfigError::Value {
            key: "compare.modes".to_owned(),
            value: format!("{text:?}"),
            allowed: format!("allowed are single, {}", allowed().join(", ")),
        })
    }
}

/// The algorithm of a sharded mode that names none.
const USUAL: Choice = Choice::Fixed(Algorithm::Ring);

/// The data-parallel modes.
fn allowed() -> Vec<String> {
    let named = Algorithm::ALL.iter().copied().map(Choice::Fixed);
    let ddp = named
        .chain([Choice::Auto])
        .map(|choice| Mode::Ddp(choice).to_string());
    let zero = Stage::ALL.map(|stage| Mode::Zero(stage, USUAL).to_string());
    let others = "each also with an algorithm behind it, as in zero:2:tree".to_owned();
    ddp.chain(zero).chain([others]).collect()
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Single => f.write_str("single"),
            Self::Ddp(choice) => write!(f, "ddp:{}", name(choice)),
            Self::Zero(stage, choice) => {
                write!(f, "zero:{}", u8::from(*stage))?;
                match *choice == USUAL {
                    true => Ok(()),
                    false => write!(f, ":{}", name(choice)),
                }
            }
        }
    }
}

fn name(choice: &Choice) -> String {
    match choice {
        Choice::Auto => "auto".to_owned(),
        Choice::Fixed(algorithm) => algorithm.to_string(),
        Choice::Sized(_) => "sized".to_owned(),
    }
}
