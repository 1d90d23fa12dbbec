//! What joins the ranks.
use std::{fmt, str::FromStr, time::Duration};

use collectives::transport::{Delayed, Link, Local, Transport};

/// The transport under a measurement: `local`, or `delayed:LATENCY_US:GBIT`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Wire {
    /// Channels between threads.
    Local,
    /// The same, as slow as such a link.
    Delayed(Link),
}

impl Wire {
    /// One end for each rank.
    pub(super) fn mesh(self, world: usize) -> Vec<Box<dyn Transport>> {
        let mesh = Local::mesh(world);
        match self {
            Self::Local => mesh.into_iter().map(|end| Box::new(end) as _).collect(),
            Self::Delayed(link) => {
                let slow = Delayed::mesh(mesh, link);
                slow.into_iter().map(|end| Box::new(end) as _).collect()
            }
        }
    }
}

/// A link of `latency_us` microseconds and `gbit` gigabits a second.
pub(super) fn link(latency_us: f64, gbit: f64) -> Option<Link> {
    let latency = Duration::try_from_secs_f64(latency_us * 1e-6).ok()?;
    // One bit a second is slow enough, and a GiB then still leaves in a time that can be told.
    (gbit.is_finite() && gbit >= 1e-9).then_some(Link {
        latency,
        bytes_per_second: gbit * 1e9 / 8.0,
    })
}

/// A text that is no transport.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no transport \"{0}\"; there are local, and delayed:LATENCY_US:GBIT such as delayed:50:10")]
pub struct NoWire(String);

impl FromStr for Wire {
    type Err = NoWire;

    fn from_str(text: &str) -> Result<Self, NoWire> {
        let delayed = || {
            let (latency, gbit) = text.strip_prefix("delayed:")?.split_once(':')?;
            link(latency.parse().ok()?, gbit.parse().ok()?).map(Self::Delayed)
        };
        match text {
            "local" => Ok(Self::Local),
            _ => delayed().ok_or_else(|| NoWire(text.to_owned())),
        }
    }
}

impl fmt::Display for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local => f.write_str("local"),
            Self::Delayed(link) => {
                let latency = link.latency.as_secs_f64() * 1e6;
                write!(f, "delayed:{latency}:{}", link.bytes_per_second * 8e-9)
            }
        }
    }
}
