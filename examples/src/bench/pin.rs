//! Threads kept on cores. Left alone, a busy system often runs two ranks that wait for
//! each other on one core, by turns; then it is the system that is measured.
use std::sync::OnceLock;

use core_affinity::CoreId;

/// Keeps this thread, and those it starts, on the core of that number, counting round
/// and round. Where the system will not, the thread stays free.
pub(super) fn pin(number: usize) {
    // Asked by a thread that is still free, so that all cores are seen.
    static CORES: OnceLock<Vec<CoreId>> = OnceLock::new();
    let cores = CORES.get_or_init(|| core_affinity::get_core_ids().unwrap_or_default());
    if let Some(&core) = cores.get(number % cores.len().max(1)) {
        core_affinity::set_for_current(core);
    }
}
