//! What every table says first: where and how it was measured.
use std::fs;

use super::{gate::cores, output::Output};

/// How times come about, and what else the machine had to do.
pub(super) fn say(out: &Output, what: &str, pinned: bool) {
    out.say(format!("# {what}"));
    let load = fs::read_to_string("/proc/loadavg").ok();
    let load = load
        .as_deref()
        .and_then(|text| text.split(' ').next())
        .unwrap_or("unknown");
    let cores = cores();
    let placed = match pinned {
        true => "rank r stays on core r mod cores",
        false => "ranks run where the system puts them",
    };
    out.say(format!(
        "# cores {cores}  load {load}  launcher threads  engine planned  {placed}"
    ));
    out.say(
        "# time: slowest rank; before each call every rank rewrites its own buffer (dirty) \
         and all meet at a barrier, untimed; contenders by turns, call by call",
    );
}
