//! What decides the bits of a computation besides its input: the program and the processor.
use std::fs::File;
use std::io::{self, Read};
use std::sync::OnceLock;

use crate::hash::Fnv;

/// Two lines, the program and the processor. Read once a process.
///
/// Burn's kernels choose their lanes by the processor's features and their blocks by its first
/// cache, and both show in the last bits of a sum.
pub(crate) fn describe() -> &'static str {
    static LINES: OnceLock<String> = OnceLock::new();
    LINES.get_or_init(|| format!("program: {}\nprocessor: {}", program(), processor()))
}

/// A hash of the program's file. One that cannot be read is like no other.
fn program() -> String {
    let hash = || -> io::Result<u64> {
        let mut file = File::open(std::env::current_exe()?)?;
        let mut hash = Fnv::default();
        let mut piece = vec![0; 1 << 20];
        loop {
            match file.read(&mut piece)? {
                0 => return Ok(hash.finish()),
                len => hash.bytes(&piece[..len]),
            }
        }
    };
    match hash() {
        Ok(hash) => format!("{hash:016x}"),
        Err(error) => format!("process {}, unreadable: {error}", std::process::id()),
    }
}

/// Model, features that change kernels, and the first cache, as far as the system tells.
fn processor() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = |key: &str| {
        let line = info.lines().find(|line| line.starts_with(key))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let cache = |name: &str| {
        let path = format!("/sys/devices/system/cpu/cpu0/cache/index0/{name}");
        std::fs::read_to_string(path).map_or_else(|_| "?".to_owned(), |text| text.trim().to_owned())
    };
    let mut features = Fnv::default();
    let flags = line("flags").or_else(|| line("Features"));
    features.bytes(flags.unwrap_or_default().as_bytes());
    format!(
        "{} {}, features {:016x}, first cache {} in {} ways",
        std::env::consts::ARCH,
        line("model name").unwrap_or_default(),
        features.finish(),
        cache("size"),
        cache("ways_of_associativity"),
    )
}
