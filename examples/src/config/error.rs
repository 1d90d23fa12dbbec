//! What can be wrong with a setting.

/// A setting that cannot be used, where it was given, and what is allowed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{file}: cannot be read: {reason}")]
    Read {
        /// The file.
        file: String,
        /// The operating system's words.
        reason: String,
    },
    /// The file is not TOML.
    #[error("{file}: not TOML: {reason}")]
    Syntax {
        /// The file.
        file: String,
        /// The parser's words, with line and column.
        reason: String,
    },
    /// The file sets something that does not exist.
    #[error("{file}: unknown key \"{key}\"; the nearest known key is \"{nearest}\"")]
    UnknownKey {
        /// The file.
        file: String,
        /// The key's path, as in `ddp.bucket_cap`.
        key: String,
        /// The path of the known key most like it.
        nearest: String,
    },
    /// A value of the wrong type, or no value of its kind.
    #[error("{origin}: {key} = {value}: {reason}")]
    Type {
        /// The file or the flag that gave the value.
        origin: String,
        /// The key's path.
        key: String,
        /// The value.
        value: String,
        /// What was expected.
        reason: String,
    },
    /// A value of the right type that makes no sense.
    #[error("{key} = {value}: {allowed}")]
    Value {
        /// The key's path.
        key: String,
        /// The value.
        value: String,
        /// What is allowed.
        allowed: String,
    },
}

impl ConfigError {
    /// For checks of values: `key = value: allowed is ...`.
    pub(super) fn value(key: &str, value: impl ToString, allowed: impl Into<String>) -> Self {
        Self::Value {
            key: key.to_owned(),
            value: value.to_string(),
            allowed: format!("allowed is {}", allowed.into()),
        }
    }

    /// ddp's own check of its section, with the section's name.
    pub(super) fn of_ddp(error: ddp::Error) -> Self {
        match error {
            ddp::Error::Config {
                name,
                value,
                expected,
            } => Self::value(&format!("ddp.{name}"), value, expected),
            other => Self::value("ddp", "", other.to_string()),
        }
    }

    /// The communicator's own check of its section, with the section's name.
    pub(super) fn of_collectives(error: collectives::Error) -> Self {
        match error {
            collectives::Error::Config { key, value, what } => Self::Value {
                key: format!("collectives.{key}"),
                value,
                allowed: what,
            },
            other => Self::value("collectives", "", other.to_string()),
        }
    }
}
