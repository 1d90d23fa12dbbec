//! Settings of a communicator: which algorithm, how long, in what pieces.
use std::{fmt, time::Duration};

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{SeqAccess, Visitor, value::SeqAccessDeserializer},
};

use crate::{Algorithm, Call, Collective, Error, Result};

/// Settings of a [`Communicator`](crate::Communicator), alike on every rank.
///
/// ```
/// use collectives::{Algorithm, CommunicatorConfig};
/// let config = CommunicatorConfig::new().with_algorithm(Algorithm::Ring);
/// assert_eq!(config.timeout_s, 60.0);
/// ```
///
/// As TOML; the algorithm of one operation overrides that of all:
///
/// ```
/// # use collectives::CommunicatorConfig;
/// let config: CommunicatorConfig = toml::from_str(r#"
///     algorithm = "auto"
///     broadcast = "tree"
///     all_reduce = [{ up_to_kb = 48, algorithm = "tree" }, { algorithm = "ring" }]
///     timeout_s = 60
/// "#).unwrap();
/// config.validate().unwrap();
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CommunicatorConfig {
    /// The algorithm of every operation that has none of its own.
    pub algorithm: Choice,
    /// The algorithm of all_reduce.
    pub all_reduce: Option<Choice>,
    /// The algorithm of reduce.
    pub reduce: Option<Choice>,
    /// The algorithm of broadcast.
    pub broadcast: Option<Choice>,
    /// The algorithm of all_gather.
    pub all_gather: Option<Choice>,
    /// The algorithm of reduce_scatter.
    pub reduce_scatter: Option<Choice>,
    /// How long a call may take, in seconds.
    pub timeout_s: f64,
    /// The most KiB in one message; longer ones are cut, so that both ends work
    /// at the same time.
    pub segment_kb: usize,
}

impl Default for CommunicatorConfig {
    fn default() -> Self {
        Self {
            algorithm: Choice::Auto,
            all_reduce: None,
            reduce: None,
            broadcast: None,
            all_gather: None,
            reduce_scatter: None,
            timeout_s: 60.0,
            segment_kb: 128,
        }
    }
}

impl CommunicatorConfig {
    /// The default settings.
    pub fn new() -> Self {
        Self::default()
    }

    /// The algorithm of every operation that has none of its own.
    pub fn with_algorithm(self, algorithm: impl Into<Choice>) -> Self {
        Self {
            algorithm: algorithm.into(),
            ..self
        }
    }

    /// The algorithm of `collective` alone.
    ///
    /// Barriers and single messages have none to choose; for them this changes nothing.
    pub fn with_algorithm_for(mut self, collective: Collective, choice: impl Into<Choice>) -> Self {
        if let Some(own) = self.own(collective) {
            *own = Some(choice.into());
        }
        self
    }

    /// How long a call may take.
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self {
            timeout_s: timeout.as_secs_f64(),
            ..self
        }
    }

    /// The most KiB in one message.
    pub fn with_segment_kb(self, segment_kb: usize) -> Self {
        Self { segment_kb, ..self }
    }

    /// Checks every setting.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] names the first setting that cannot be, and what is allowed.
    pub fn validate(&self) -> Result<()> {
        let refuse = |key: &str, value: String, what: &str| {
            Err(Error::Config {
                key: key.to_owned(),
                value,
                what: what.to_owned(),
            })
        };
        if Duration::try_from_secs_f64(self.timeout_s).map_or(true, |time| time.is_zero()) {
            let what = "a time in seconds above 0 is needed";
            return refuse("timeout_s", self.timeout_s.to_string(), what);
        }
        if !(1..=1 << 20).contains(&self.segment_kb) {
            let what = "1 to 1048576 KiB are allowed";
            return refuse("segment_kb", self.segment_kb.to_string(), what);
        }
        let mut choices = vec![("algorithm", &self.algorithm)];
        choices.extend(
            Collective::PLANNED
                .into_iter()
                .filter_map(|collective| Some((collective.name(), self.choice_of(collective)?))),
        );
        for (key, choice) in choices {
            if let Choice::Sized(rules) = choice
                && let Some(what) = fault(rules)
            {
                return refuse(key, format!("{rules:?}"), what);
            }
        }
        Ok(())
    }

    /// The algorithm that carries out `call` among `world` ranks.
    pub fn pick(&self, call: &Call, world: usize) -> Algorithm {
        self.choice_of(call.collective)
            .unwrap_or(&self.algorithm)
            .pick(call, world)
    }

    pub(crate) fn timeout(&self) -> Duration {
        Duration::try_from_secs_f64(self.timeout_s).unwrap_or(Duration::MAX)
    }

    fn choice_of(&self, collective: Collective) -> Option<&Choice> {
        match collective {
            Collective::AllReduce => self.all_reduce.as_ref(),
            Collective::Reduce => self.reduce.as_ref(),
            Collective::Broadcast => self.broadcast.as_ref(),
            Collective::AllGather => self.all_gather.as_ref(),
            Collective::ReduceScatter => self.reduce_scatter.as_ref(),
            Collective::Barrier | Collective::SendRecv => None,
        }
    }

    fn own(&mut self, collective: Collective) -> Option<&mut Option<Choice>> {
        match collective {
            Collective::AllReduce => Some(&mut self.all_reduce),
            Collective::Reduce => Some(&mut self.reduce),
            Collective::Broadcast => Some(&mut self.broadcast),
            Collective::AllGather => Some(&mut self.all_gather),
            Collective::ReduceScatter => Some(&mut self.reduce_scatter),
            Collective::Barrier | Collective::SendRecv => None,
        }
    }
}

/// How an algorithm is chosen.
#[derive(Clone, Debug, PartialEq)]
pub enum Choice {
    /// By operation, size and world: see [`Choice::pick`].
    Auto,
    /// Always this one.
    Fixed(Algorithm),
    /// By size: the first rule that holds.
    Sized(Vec<Rule>),
}

/// An algorithm for buffers up to a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// The largest buffer in KiB for which it holds; without it, any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub up_to_kb: Option<usize>,
    /// What then runs.
    pub algorithm: Algorithm,
}

/// Above this many bytes `auto` takes the ring for an all_reduce among three
/// ranks or more, up to it the tree.
///
/// Channels between threads, 2 cores: four and eight ranks cross at about 48 KiB;
/// between two ranks the ring is never slower.
const TREE_UP_TO: usize = 48 << 10;

impl Choice {
    /// The algorithm for `call` among `world` ranks.
    ///
    /// `auto` takes the tree for reduce and broadcast, the ring for all_gather and
    /// reduce_scatter, and for all_reduce the tree while buffers are small, the ring
    /// above, and always between two ranks.
    pub fn pick(&self, call: &Call, world: usize) -> Algorithm {
        match self {
            Self::Fixed(algorithm) => *algorithm,
            Self::Sized(rules) => rules
                .iter()
                .find(|rule| rule.up_to_kb.is_none_or(|most| call.bytes() <= most << 10))
                .map_or(Algorithm::Tree, |rule| rule.algorithm),
            Self::Auto => match call.collective {
                Collective::AllReduce if world > 2 && call.bytes() <= TREE_UP_TO => Algorithm::Tree,
                Collective::Reduce | Collective::Broadcast | Collective::Barrier => Algorithm::Tree,
                _ => Algorithm::Ring,
            },
        }
    }
}

fn fault(rules: &[Rule]) -> Option<&'static str> {
    let bounds: Vec<_> = rules.iter().map(|rule| rule.up_to_kb).collect();
    match bounds.split_last() {
        None => Some("at least one rule is needed"),
        Some((Some(_), _)) => Some("the last rule must hold for any size: leave out up_to_kb"),
        Some((None, rest)) if rest.contains(&None) => {
            Some("only the last rule may be without up_to_kb: those after it would never hold")
        }
        Some((None, rest)) if !rest.is_sorted_by(|a, b| a < b) => {
            Some("rules must be in ascending order of up_to_kb")
        }
        _ => None,
    }
}

impl From<Algorithm> for Choice {
    fn from(algorithm: Algorithm) -> Self {
        Self::Fixed(algorithm)
    }
}

impl std::str::FromStr for Choice {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<Self, String> {
        match name {
            "auto" => Ok(Self::Auto),
            _ => name
                .parse()
                .map(Self::Fixed)
                .map_err(|error| format!("{error}, and auto")),
        }
    }
}

impl Serialize for Choice {
    fn serialize<S: Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            Self::Auto => to.serialize_str("auto"),
            Self::Fixed(algorithm) => to.serialize_str(algorithm.name()),
            Self::Sized(rules) => rules.serialize(to),
        }
    }
}

impl<'de> Deserialize<'de> for Choice {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Choice;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"auto\", the name of an algorithm, or a list of rules by size")
            }

            fn visit_str<E: serde::de::Error>(self, name: &str) -> std::result::Result<Choice, E> {
                name.parse().map_err(E::custom)
            }

            fn visit_seq<A: SeqAccess<'de>>(
                self,
                rules: A,
            ) -> std::result::Result<Choice, A::Error> {
                Deserialize::deserialize(SeqAccessDeserializer::new(rules)).map(Choice::Sized)
            }
        }
        from.deserialize_any(Either)
    }
}
