//! Lays a TOML file and flags over defaults, one key at a time.
//!
//! The known keys are those of the serialised defaults, so there is no second
//! list to keep. They are serialised as JSON, which, unlike TOML, keeps the
//! keys of options that are not set.

use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::ConfigError;

/// A setting given on the command line.
#[derive(Debug, Clone, PartialEq)]
pub struct Flag {
    /// The flag as typed, as in `--lr`.
    pub name: &'static str,
    /// The key it sets, as in `optim.lr`.
    pub key: &'static str,
    /// The value it sets.
    pub value: Value,
}

/// Defaults, then the file's keys, then the flags, in this order.
///
/// # Errors
/// [`ConfigError`]: a file that cannot be read or parsed, a key that does not
/// exist (with the nearest one that does), a value of the wrong type.
///
/// ```
/// use examples::{Flag, Settings, resolve};
///
/// let flag = Flag { name: "--lr", key: "optim.lr", value: 0.5.into() };
/// let settings: Settings = resolve(&Settings::train(), None, &[flag])?;
/// assert_eq!(settings.optim.lr, 0.5);
/// # Ok::<(), examples::ConfigError>(())
/// ```
pub fn resolve<T: Serialize + DeserializeOwned>(
    defaults: &T,
    file: Option<&Path>,
    flags: &[Flag],
) -> Result<T, ConfigError> {
    let mut tree = serde_json::to_value(defaults).expect("settings serialise");
    if let Some(path) = file {
        let name = path.display().to_string();
        for (keys, value) in leaves(&tree, read(path)?) {
            if let Some(nearest) = nearest_if_unknown(&tree, &keys) {
                return Err(ConfigError::UnknownKey {
                    file: name,
                    key: keys.join("."),
                    nearest,
                });
            }
            set::<T>(&mut tree, &name, &keys, value)?;
        }
    }
    for flag in flags {
        let keys: Vec<String> = flag.key.split('.').map(str::to_owned).collect();
        set::<T>(&mut tree, flag.name, &keys, flag.value.clone())?;
    }
    Ok(T::deserialize(tree).expect("every key was checked when it was set"))
}

/// The settings as a TOML file that [`resolve`] reads back to the same.
///
/// ```
/// let text = examples::print(&examples::Settings::train());
/// assert!(text.contains("lr = 0.1"));
/// ```
pub fn print<T: Serialize>(settings: &T) -> String {
    toml::to_string(settings).expect("settings serialise")
}

/// The rows of a tuning file, as `bench crossover` writes it.
///
/// # Errors
/// [`ConfigError`]: a file that cannot be read, or that holds something else.
pub(crate) fn read_tuning(path: &Path) -> Result<Value, ConfigError> {
    let mut file = read(path)?;
    match (file.remove("tuning"), file.keys().next()) {
        (Some(rows), None) => Ok(rows),
        (_, other) => Err(ConfigError::Syntax {
            file: path.display().to_string(),
            reason: match other {
                Some(key) => format!("\"{key}\" has no place beside [[tuning]]"),
                None => "no rows of [[tuning]], as `bench crossover` writes them".to_owned(),
            },
        }),
    }
}

fn read(path: &Path) -> Result<Map<String, Value>, ConfigError> {
    let file = path.display().to_string();
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) => {
            return Err(ConfigError::Read {
                file,
                reason: error.to_string(),
            });
        }
    };
    let table: toml::Table = toml::from_str(&text).map_err(|error| ConfigError::Syntax {
        file,
        reason: error.to_string().trim_end().to_owned(),
    })?;
    Ok(table
        .into_iter()
        .map(|(key, value)| (key, json(value)))
        .collect())
}

/// What JSON does not have goes on as text, for the setting to refuse: as null a number that is
/// none would unset an option.
fn json(value: toml::Value) -> Value {
    match value {
        toml::Value::String(text) => text.into(),
        toml::Value::Integer(number) => number.into(),
        toml::Value::Float(number) if number.is_finite() => number.into(),
        toml::Value::Float(number) => number.to_string().into(),
        toml::Value::Boolean(value) => value.into(),
        toml::Value::Datetime(time) => time.to_string().into(),
        toml::Value::Array(values) => values.into_iter().map(json).collect(),
        toml::Value::Table(table) => table
            .into_iter()
            .map(|(key, value)| (key, json(value)))
            .collect(),
    }
}

/// The paths at which the file says something: as deep as the defaults have
/// tables, or as deep as the file does where the defaults have nothing.
fn leaves(defaults: &Value, file: Map<String, Value>) -> Vec<(Vec<String>, Value)> {
    let mut found = Vec::new();
    for (key, value) in file {
        match (defaults.get(&key), value) {
            (Some(inner @ Value::Object(_)), Value::Object(map)) => {
                for (mut keys, value) in leaves(inner, map) {
                    keys.insert(0, key.clone());
                    found.push((keys, value));
                }
            }
            (_, value) => found.push((vec![key], value)),
        }
    }
    found
}

/// Sets one value and sees at once whether the whole still makes a `T`, so
/// that an error can name the key at fault.
fn set<T: DeserializeOwned>(
    tree: &mut Value,
    origin: &str,
    keys: &[String],
    value: Value,
) -> Result<(), ConfigError> {
    let mut place = &mut *tree;
    for key in keys {
        place = &mut place[key.as_str()];
    }
    *place = value.clone();
    match T::deserialize(&*tree) {
        Ok(_) => Ok(()),
        Err(error) => Err(ConfigError::Type {
            origin: origin.to_owned(),
            key: keys.join("."),
            value: value.to_string(),
            reason: error.to_string(),
        }),
    }
}

/// `None` if the path exists in the defaults.
fn nearest_if_unknown(defaults: &Value, keys: &[String]) -> Option<String> {
    let mut place = defaults;
    for key in keys {
        match place.get(key) {
            Some(inner) => place = inner,
            None => return Some(nearest(defaults, keys)),
        }
    }
    None
}

/// The known path most like `keys`: by its last key, and among equals by the
/// tables it lies in. So both `ddp.buckt_cap_mb` and a bare `bucket_cap_mb`
/// lead to `ddp.bucket_cap_mb`.
fn nearest(defaults: &Value, keys: &[String]) -> String {
    let distance = |known: &Vec<String>| {
        let (last, above) = known.split_last().expect("a path has a key");
        let (wanted, wanted_above) = keys.split_last().expect("a path has a key");
        let of_last = strsim::damerau_levenshtein(last, wanted);
        let of_above = strsim::damerau_levenshtein(&above.join("."), &wanted_above.join("."));
        (of_last + usize::from(of_above > 0), of_above)
    };
    let mut known = Vec::new();
    paths(defaults, &mut Vec::new(), &mut known);
    let best = known.iter().min_by_key(|path| distance(path));
    best.map(|path| path.join(".")).unwrap_or_default()
}

fn paths(tree: &Value, above: &mut Vec<String>, found: &mut Vec<Vec<String>>) {
    let Value::Object(map) = tree else { return };
    for (key, inner) in map {
        above.push(key.clone());
        found.push(above.clone());
        paths(inner, above, found);
        above.pop();
    }
}
