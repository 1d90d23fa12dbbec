//! Settings of a communicator: which algorithm, how long, in what pieces.
use std::{fmt, time::Duration};

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{SeqAccess, Visitor, value::SeqAccessDeserializer},
};

use crate::{
    Algorithm, Call, Collective, Error, Result,
    tuning::{self, Cost},
};

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
    /// at the same time. A ring of two pinned ranks took 302, 264, 241 and 231 µs for
    /// 4 MiB in segments of 64, 128, 256 and 512 KiB; larger ones leave the cache.
    pub segment_kb: usize,
    /// Whether every sum is the one tree over ranks, whatever the algorithm: the
    /// same bits for all of them. The first pass of a ring, and of halving among
    /// ranks that are no power of two, is then the direct exchange. Every NaN is then
    /// the one NaN.
    pub deterministic: bool,
    /// The least elements of an all_reduce that `direct` gives to one owner. With
    /// 4096 it cuts buffers as Alink does.
    pub direct_piece: usize,
    /// What `auto` goes by, as `bench crossover` measures it; without any row, what
    /// was measured for threads over channels on two cores.
    pub tuning: Vec<Cost>,
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
            segment_kb: 256,
            deterministic: false,
            direct_piece: 1,
            tuning: vec![],
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

    /// Whether every sum is the one tree over ranks.
    pub fn with_deterministic(self, deterministic: bool) -> Self {
        Self {
            deterministic,
            ..self
        }
    }

    /// The least elements of an all_reduce that `direct` gives to one owner.
    pub fn with_direct_piece(self, direct_piece: usize) -> Self {
        Self {
            direct_piece,
            ..self
        }
    }

    /// What `auto` goes by.
    pub fn with_tuning(self, tuning: Vec<Cost>) -> Self {
        Self { tuning, ..self }
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
            let what = "a time in seconds above 0, and below 1.8e19, is needed; 1e9 is 31 years";
            return refuse("timeout_s", self.timeout_s.to_string(), what);
        }
        if !(1..=1 << 20).contains(&self.segment_kb) {
            let what = "1 to 1048576 KiB are allowed";
            return refuse("segment_kb", self.segment_kb.to_string(), what);
        }
        if self.direct_piece == 0 {
            return refuse(
                "direct_piece",
                "0".to_owned(),
                "at least 1 element is needed",
            );
        }
        for cost in &self.tuning {
            if cost.ranks == 0 {
                return refuse(
                    "tuning.ranks",
                    "0".to_owned(),
                    "at least one rank is needed",
                );
            }
            for (key, value) in [
                ("tuning.alpha_us", cost.alpha_us),
                ("tuning.beta_us_per_kib", cost.beta_us_per_kib),
            ] {
                if !(value.is_finite() && value >= 0.0) {
                    return refuse(key, value.to_string(), "a finite time from 0 on is needed");
                }
            }
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
        match self.choice_of(call.collective).unwrap_or(&self.algorithm) {
            Choice::Fixed(algorithm) => *algorithm,
            Choice::Sized(rules) => rules
                .iter()
                .find(|rule| {
                    rule.up_to_kb
                        .is_none_or(|most| call.bytes() <= most.saturating_mul(1024))
                })
                .map_or(Algorithm::Tree, |rule| rule.algorithm),
            Choice::Auto => tuning::cheapest(&self.tuning, call, world)
                .or_else(|| tuning::cheapest(tuning::MEASURED, call, world))
                .unwrap_or(match call.collective {
                    Collective::AllGather | Collective::ReduceScatter => Algorithm::Ring,
                    _ => Algorithm::Tree,
                }),
        }
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
            _ => None,
        }
    }

    fn own(&mut self, collective: Collective) -> Option<&mut Option<Choice>> {
        match collective {
            Collective::AllReduce => Some(&mut self.all_reduce),
            Collective::Reduce => Some(&mut self.reduce),
            Collective::Broadcast => Some(&mut self.broadcast),
            Collective::AllGather => Some(&mut self.all_gather),
            Collective::ReduceScatter => Some(&mut self.reduce_scatter),
            _ => None,
        }
    }
}

/// How an algorithm is chosen.
#[derive(Clone, Debug, PartialEq)]
pub enum Choice {
    /// The cheapest for the operation, size and world, by
    /// [what was measured](CommunicatorConfig::tuning); where nothing was, the ring for
    /// all_gather and reduce_scatter, and the tree.
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
