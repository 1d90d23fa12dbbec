//! What the tests share: worlds of ranks, whole numbers, and a process of one's own.
use std::{
    env, fs,
    panic::{AssertUnwindSafe, catch_unwind},
    process::Command,
    thread,
    time::Duration,
};

use collectives::{
    Algorithm, Communicator, CommunicatorConfig, Element, Place, Result, bf16, f16,
    transport::{Local, Transport},
};

/// Long enough for any call that works, short enough for one that hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Settings under which `algorithm` carries out everything.
pub(crate) fn by(algorithm: Algorithm) -> CommunicatorConfig {
    CommunicatorConfig::new()
        .with_algorithm(algorithm)
        .with_timeout(PATIENCE)
}

/// What `body` returns on each rank of a new world, by rank.
pub(crate) fn each_rank<R: Send>(
    world: usize,
    config: &CommunicatorConfig,
    body: impl Fn(Communicator) -> R + Sync,
) -> Vec<R> {
    each_with(&vec![config.clone(); world], body)
}

/// The same with settings of its own for each rank.
pub(crate) fn each_with<R: Send>(
    configs: &[CommunicatorConfig],
    body: impl Fn(Communicator) -> R + Sync,
) -> Vec<R> {
    let join =
        |outcome: std::result::Result<R, String>| outcome.unwrap_or_else(|what| panic!("{what}"));
    ends(configs, body).into_iter().map(join).collect()
}

/// The same over links of another kind.
pub(crate) fn each_over<R: Send>(
    mesh: impl IntoIterator<Item = impl Transport + 'static>,
    config: &CommunicatorConfig,
    body: impl Fn(Communicator) -> R + Sync,
) -> Vec<R> {
    let body = &body;
    thread::scope(|scope| {
        let start = |link| {
            let communicator = Communicator::new(link, config).unwrap();
            scope.spawn(move || body(communicator))
        };
        let ranks: Vec<_> = mesh.into_iter().map(start).collect();
        let join = |rank: thread::ScopedJoinHandle<'_, R>| rank.join().unwrap();
        ranks.into_iter().map(join).collect()
    })
}

/// The same where ranks may panic: what they returned, or what the panic said.
pub(crate) fn ends<R: Send>(
    configs: &[CommunicatorConfig],
    body: impl Fn(Communicator) -> R + Sync,
) -> Vec<std::result::Result<R, String>> {
    let body = &body;
    thread::scope(|scope| {
        let ranks: Vec<_> = Local::mesh(configs.len())
            .into_iter()
            .zip(configs)
            .map(|(link, config)| {
                let communicator = Communicator::new(link, config).unwrap();
                scope.spawn(move || body(communicator))
            })
            .collect();
        ranks
            .into_iter()
            .enumerate()
            .map(|(rank, thread)| {
                thread.join().map_err(|panic| {
                    let said = panic
                        .downcast_ref::<String>()
                        .map(String::as_str)
                        .or_else(|| panic.downcast_ref::<&str>().copied());
                    format!("rank {rank} panicked: {}", said.unwrap_or("?"))
                })
            })
            .collect()
    })
}

/// Runs `check` on all of `cases` at once: most of their time is waiting.
pub(crate) fn at_once<C: Send>(cases: impl IntoIterator<Item = C>, check: impl Fn(C) + Sync) {
    let check = &check;
    thread::scope(|scope| {
        for case in cases {
            scope.spawn(move || check(case));
        }
    });
}

/// Runs `body` in a process in which nothing else runs, since threads and memory
/// are counted per process. `test` is the full name of the calling test.
pub(crate) fn alone(test: &str, body: impl FnOnce()) {
    const INSIDE: &str = "LOCKSTEP_TEST_ALONE";
    if env::var_os(INSIDE).is_some() {
        return body();
    }
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(INSIDE, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Whether there is time for the full numbers.
pub(crate) fn soak() -> bool {
    env::var_os("LOCKSTEP_SOAK").is_some()
}

/// Bytes of this process that are in memory.
pub(crate) fn resident() -> usize {
    const PAGE: usize = 4096;
    let pages = fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * PAGE
}

/// Threads of this process.
pub(crate) fn threads() -> usize {
    fs::read_dir("/proc/self/task").unwrap().count()
}

/// Whether `call` panics.
pub(crate) fn panics(call: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(call)).is_err()
}

/// Every place of a world.
pub(crate) fn places(world: usize) -> impl Iterator<Item = Place> {
    (0..world).map(move |rank| Place::new(rank, world))
}

/// Every pair of an algorithm and a world size.
pub(crate) fn everywhere(worlds: &[usize]) -> impl Iterator<Item = (Algorithm, usize)> + '_ {
    Algorithm::ALL
        .iter()
        .flat_map(move |&algorithm| worlds.iter().map(move |&world| (algorithm, world)))
}

/// A call with one kind of result, to stand in tables.
pub(crate) type Deed = fn(&mut Communicator) -> Result<()>;

/// Elements that whole numbers can be turned into, and compared by bits.
pub(crate) trait Number: Element {
    const SIGNED: bool;
    fn of(whole: i64) -> Self;
    fn ratio(sum: i64, count: usize) -> Self;
    fn bits(self) -> u64;
}

macro_rules! numbers {
    ($($t:ident $signed:literal $of:expr, $ratio:expr, $bits:expr;)*) => {$(
        impl Number for $t {
            const SIGNED: bool = $signed;
            fn of(whole: i64) -> Self {
                let of: fn(i64) -> $t = $of;
                of(whole)
            }
            fn ratio(sum: i64, count: usize) -> Self {
                let ratio: fn(i64, usize) -> $t = $ratio;
                ratio(sum, count)
            }
            fn bits(self) -> u64 {
                let bits: fn($t) -> u64 = $bits;
                bits(self)
            }
        }
    )*};
}

// 16-bit floats are made from f32, which is exact for the numbers at hand: rounded once.
numbers! {
    f32 true |x| x as f32, |sum, count| sum as f32 / count as f32, |x| x.to_bits().into();
    f64 true |x| x as f64, |sum, count| sum as f64 / count as f64, f64::to_bits;
    f16 true |x| Self::from_f32(x as f32), |sum, count| Self::from_f32(sum as f32 / count as f32),
        |x| x.to_bits().into();
    bf16 true |x| Self::from_f32(x as f32), |sum, count| Self::from_f32(sum as f32 / count as f32),
        |x| x.to_bits().into();
    i32 true |x| x as i32, |_, _| unreachable!("integers have no mean"), |x| x as u64;
    i64 true |x| x, |_, _| unreachable!("integers have no mean"), |x| x as u64;
    u8 false |x| x as u8, |_, _| unreachable!("integers have no mean"), u64::from;
    u32 false |x| x as u32, |_, _| unreachable!("integers have no mean"), u64::from;
    u64 false |x| x as u64, |_, _| unreachable!("integers have no mean"), |x| x;
}

/// The bits of each element.
pub(crate) fn bits<T: Number>(elements: &[T]) -> Vec<u64> {
    elements.iter().map(|element| element.bits()).collect()
}
