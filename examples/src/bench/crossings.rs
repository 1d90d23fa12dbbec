//! What `bench crossover` says of its times: tables, and who overtakes whom.
use collectives::{
    Algorithm, Collective,
    tuning::{self, Cost},
};

use super::{
    Bytes, Curve, Overtaking,
    output::Output,
    picture::{self, Panel},
    row::name,
    spot::Spot,
    table::{Columns, short},
};

/// Where the seed's question is answered, whatever else is measured.
pub(super) const SEED_RANKS: usize = 4;
pub(super) const SEED_SIZES: [usize; 3] = [1 << 10, 1 << 20, 16 << 20];

/// Says and draws everything.
pub(super) fn say(out: &Output, spots: &[Spot], curves: &[Curve]) {
    for curves in curves.chunk_by(same_panel) {
        say_table(out, spots, curves);
        say_ring(out, curves);
    }
    let seed: Vec<_> = spots.iter().filter(|spot| is_seed(spot)).collect();
    if !seed.is_empty() {
        let columns = columns();
        out.say(format!(
            "\n# ring or tree, {SEED_RANKS} ranks: us, shortest / median"
        ));
        out.say(columns.heading());
        seed.iter()
            .for_each(|spot| out.say(columns.line(&cells(spot))));
    }
}

/// One panel for each collective and number of ranks.
pub(super) fn draw(curves: &[Curve]) -> String {
    let line = |curve: &Curve| {
        let points = curve.points.iter();
        let points = points.map(|&(bytes, time)| (bytes as f64, time)).collect();
        (curve.algorithm.name().to_owned(), points)
    };
    let panels: Vec<_> = (curves.chunk_by(same_panel))
        .map(|curves| Panel {
            title: format!("{}, {} ranks", name(curves[0].collective), curves[0].ranks),
            lines: curves.iter().map(line).collect(),
        })
        .collect();
    picture::draw(&panels)
}

fn same_panel(a: &Curve, b: &Curve) -> bool {
    (a.collective, a.ranks) == (b.collective, b.ranks)
}

fn is_seed(spot: &Spot) -> bool {
    spot.job.collective == Collective::AllReduce
        && spot.ranks == SEED_RANKS
        && SEED_SIZES.contains(&spot.job.bytes())
}

fn columns() -> Columns {
    let algorithms = Algorithm::ALL
        .iter()
        .map(|algorithm| (algorithm.name().to_owned(), 15));
    let first = [("size".to_owned(), 8)];
    let last = [("fastest".to_owned(), 8)];
    Columns::new(first.into_iter().chain(algorithms).chain(last))
}

fn cells(spot: &Spot) -> Vec<String> {
    let times = spot.measured.iter().map(|measured| {
        let times = &measured.times;
        format!("{} / {}", short(times.min()), short(times.median()))
    });
    let all = spot.measured.iter().zip(Algorithm::ALL);
    let fastest = all.min_by(|(a, _), (b, _)| a.times.min().total_cmp(&b.times.min()));
    let fastest = fastest.map_or("-", |(_, algorithm)| algorithm.name());
    [Bytes(spot.job.bytes()).to_string()]
        .into_iter()
        .chain(times)
        .chain([fastest.to_owned()])
        .collect()
}

fn say_table(out: &Output, spots: &[Spot], curves: &[Curve]) {
    let (collective, ranks) = (curves[0].collective, curves[0].ranks);
    let columns = columns();
    out.say(format!(
        "\n# {} of f32, ranks {ranks}: us, shortest / median",
        name(collective)
    ));
    out.say(columns.heading());
    let here = |spot: &&Spot| (spot.job.collective, spot.ranks) == (collective, ranks);
    spots
        .iter()
        .filter(here)
        .for_each(|spot| out.say(columns.line(&cells(spot))));
    let costs: Vec<_> = curves.iter().map(Curve::cost).collect();
    let line = |what: &str, of: fn(&Cost) -> f64| {
        let cells = costs.iter().map(|cost| short(of(cost)));
        let cells: Vec<_> = [what.to_owned()].into_iter().chain(cells).collect();
        out.say(columns.line(&cells));
    };
    line("alpha us", |cost| cost.alpha_us);
    line("us/KiB", |cost| cost.beta_us_per_kib);
}

fn say_ring(out: &Output, curves: &[Curve]) {
    let is_ring = |curve: &&Curve| curve.algorithm == Algorithm::Ring;
    let Some(ring) = curves.iter().find(is_ring) else {
        return;
    };
    for other in curves.iter().filter(|curve| !is_ring(curve)) {
        let measured = match ring.overtakes(other) {
            Overtaking::Throughout => "at every size".to_owned(),
            Overtaking::Never => "at no size".to_owned(),
            Overtaking::From(bytes) => from(bytes),
        };
        let (small, large) = (other.cost(), ring.cost());
        let dearer =
            small.alpha_us >= large.alpha_us && small.beta_us_per_kib >= large.beta_us_per_kib;
        let fitted = match tuning::crossover(&small, &large) {
            Some(bytes) => from(bytes),
            None if dearer => "at every size".to_owned(),
            None => "at no size".to_owned(),
        };
        out.say(format!(
            "# ranks {}: ring overtakes {} {measured} by what was measured, {fitted} by the fitted lines",
            ring.ranks, other.algorithm
        ));
    }
}

fn from(bytes: usize) -> String {
    format!("from {} KiB on", short(bytes as f64 / 1024.0))
}
