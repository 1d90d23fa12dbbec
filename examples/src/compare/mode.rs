//! Ways to train the same model.

use std::fmt;
use std::str::FromStr;

use collectives::Choice;

use crate::ConfigError;

/// One way to train, as `--modes` names it.
#[derive(Debug, Clone, PartialEq)]
pub enum Mode {
    /// A plain Burn loop on one thread.
    Single,
    /// Data-parallel, all-reducing as chosen.
    Ddp(Choice),
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
}

impl FromStr for Mode {
    type Err = ConfigError;

    /// ```
    /// use collectives::{Algorithm, Choice};
    /// use examples::Mode;
    ///
    /// let mode: Mode = "ddp:ring".parse()?;
    /// assert_eq!(mode, Mode::Ddp(Choice::Fixed(Algorithm::Ring)));
    /// assert!("ddp:star".parse::<Mode>().is_err());
    /// # Ok::<(), examples::ConfigError>(())
    /// ```
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        if text == "single" {
            return Ok(Self::Single);
        }
        let choice = text.strip_prefix("ddp:").map(Choice::from_str);
        match choice {
            Some(Ok(choice)) => Ok(Self::Ddp(choice)),
            _ => Err(ConfigError::Value {
                key: "compare.modes".to_owned(),
                value: format!("{text:?}"),
                allowed: format!("allowed are single, {}", allowed().join(", ")),
            }),
        }
    }
}

/// The data-parallel modes.
fn allowed() -> Vec<String> {
    let named = collectives::Algorithm::ALL
        .iter()
        .copied()
        .map(Choice::Fixed);
    named
        .chain([Choice::Auto])
        .map(|choice| Mode::Ddp(choice).to_string())
        .collect()
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Single => f.write_str("single"),
            Self::Ddp(Choice::Auto) => f.write_str("ddp:auto"),
            Self::Ddp(Choice::Fixed(algorithm)) => write!(f, "ddp:{algorithm}"),
            Self::Ddp(Choice::Sized(_)) => f.write_str("ddp:sized"),
        }
    }
}
