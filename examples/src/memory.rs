//! What a rank holds by stage and world size: what zero's report predicts, and what an allocator counts.
//!
//! A rank is a thread, and what its thread allocates is counted. Burn lets any thread free the graph that
//! another one has left, so no count of a rank is right in all. But what is freed when a rank drops its
//! replica is what it held, and what a phase takes beyond what it began with is its own.

use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor};
use collectives::{Communicator, CommunicatorConfig, launch};
use ddp::{DdpConfig, DistributedDataParallel};
use zero::{MemoryReport, Peak, ShardedDataParallel, Stage, ZeroConfig};

use crate::model::tensor;
use crate::{Error, Mlp, Settings, optimizer};

/// Runs its argument, and says what this thread has allocated meanwhile. Only a program has an allocator
/// that counts, and the other ones are not to be slowed by it.
pub type CountAllocations = fn(&mut dyn FnMut()) -> Allocated;

/// Bytes that a thread has allocated, less those that it has freed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Allocated {
    /// In the end.
    pub left: i64,
    /// At most at a time.
    pub most: u64,
}

/// One rank of a stage and a world size.
#[derive(Debug, Clone, PartialEq)]
pub struct RankMemory {
    /// As reported after a backward pass.
    pub report: MemoryReport,
    /// What was counted, if it was.
    pub counted: Option<CountedMemory>,
}

/// Bytes that one rank was counted to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CountedMemory {
    /// After a backward pass.
    pub held: usize,
    /// At most in each phase, without the activations.
    pub peak: Peak,
}

/// All ranks of a stage and a world size.
#[derive(Debug, Clone, PartialEq)]
pub struct WorldMemory {
    /// None for ddp.
    pub stage: Option<Stage>,
    /// By rank.
    pub ranks: Vec<RankMemory>,
}

/// Kilobytes of a message between two ranks.
const MESSAGE_KB: usize = 8;

/// Bytes that are in no formula beside a share of 1 %: up to 64 KiB each for the rungs on which the taps
/// stand, Burn's graph, short lists and what the communicator sets aside, and six messages of 8 KiB for
/// each of the other ranks.
pub(crate) fn constants(world: usize) -> usize {
    (4 * 64 + 6 * MESSAGE_KB * (world - 1)) << 10
}

impl RankMemory {
    /// What was counted unlike the prediction: its name, the prediction and the count. 1 % and the
    /// constants may lie between them; a peak may be lower, where what is predicted together does not
    /// come together.
    pub fn wrong(&self, world: usize) -> Vec<(&'static str, usize, usize)> {
        let MemoryReport {
            predicted,
            measured,
            peak,
            ..
        } = &self.report;
        let mut exact = vec![
            ("parameters", predicted.parameters, measured.parameters),
            ("gradients", predicted.gradients, measured.gradients),
            ("state", predicted.state, measured.state),
        ];
        exact.retain(|(_, predicted, measured)| predicted != measured);
        let counted = self.counted.iter().flat_map(|counted| {
            [
                ("held", predicted.total(), counted.held, false),
                ("forward peak", peak.forward, counted.peak.forward, true),
                ("backward peak", peak.backward, counted.peak.backward, true),
                ("step peak", peak.step, counted.peak.step, true),
            ]
        });
        let far = counted.filter(|&(_, predicted, counted, may_be_less)| {
            let off = match may_be_less {
                true => counted.saturating_sub(predicted),
                false => counted.abs_diff(predicted),
            };
            off > predicted / 100 + constants(world)
        });
        exact.extend(far.map(|(what, predicted, counted, _)| (what, predicted, counted)));
        exact
    }
}

/// Trains a few steps by ddp and by every stage, for every world size of `[memory]`, and hands each to
/// `tell` when it is known.
///
/// # Errors
/// [`Error`], of ddp or a rank.
pub fn memory(
    settings: &Settings,
    count: CountAllocations,
    mut tell: impl FnMut(WorldMemory),
) -> Result<(), Error> {
    let device = Device::flex().autodiff();
    let Settings { model, run, .. } = settings;
    let plain = Mlp::new(&model.layers, run.seed, model.dtype, &device);
    // What Burn makes once; and what a forward pass leaves for the backward pass.
    drop(loss(&plain, settings).backward());
    let mut kept = None;
    let forward = count(&mut || kept = Some(loss(&plain, settings)));
    drop(kept.map(|loss| loss.backward()));
    let bench = Bench {
        settings,
        plain,
        activations: usize::try_from(forward.left).unwrap_or_default(),
        count,
    };
    let stages = || [None].into_iter().chain(Stage::ALL.map(Some));
    for stage in stages() {
        for &world in &settings.memory.world_sizes {
            let ranks = match settings.memory.measure {
                true => bench.counted(stage, world)?,
                false => bench.predicted(stage, world)?,
            };
            tell(WorldMemory { stage, ranks });
        }
    }
    Ok(())
}

/// Of one row, since activations are not what is measured.
fn loss(model: &Mlp, settings: &Settings) -> Tensor<1> {
    let features = settings.model.layers[0];
    let device = Device::flex().autodiff();
    let row = tensor(
        vec![1.0; features],
        [1, features],
        settings.model.dtype,
        &device,
    );
    model.forward(row).square().mean()
}

struct Bench<'a> {
    settings: &'a Settings,
    plain: Mlp,
    /// Bytes that Burn keeps between a forward and a backward pass.
    activations: usize,
    count: CountAllocations,
}

/// What one rank's replica was counted to hold when it was dropped, the most that each phase took on top
/// of what there was before, and what a forward pass left.
struct Counts {
    report: MemoryReport,
    dropped: usize,
    most: [usize; 3],
    left: usize,
}

impl Bench<'_> {
    fn counted(&self, stage: Option<Stage>, world: usize) -> Result<Vec<RankMemory>, Error> {
        let between_steps = self.steps(stage, world, false)?;
        let with_gradients = self.steps(stage, world, true)?;
        let ranks = between_steps.into_iter().zip(with_gradients);
        let joined = ranks.map(|(idle, held)| {
            let less = |bytes: usize| bytes.saturating_sub(self.activations);
            RankMemory {
                counted: Some(CountedMemory {
                    held: held.dropped,
                    peak: Peak {
                        forward: less(idle.dropped + idle.most[0]),
                        backward: less(idle.dropped + idle.left + idle.most[1]),
                        step: held.dropped + held.most[2],
                    },
                }),
                report: held.report,
            }
        });
        Ok(joined.collect())
    }

    fn predicted(&self, stage: Option<Stage>, world: usize) -> Result<Vec<RankMemory>, Error> {
        let ranks = self.steps(stage, world, true)?;
        let report = |counts: Counts| RankMemory {
            report: counts.report,
            counted: None,
        };
        Ok(ranks.into_iter().map(report).collect())
    }

    /// Three steps on every rank, the first of which are unlike the others; and one more backward pass, if
    /// the replicas are to be dropped `with_gradients`.
    fn steps(
        &self,
        stage: Option<Stage>,
        world: usize,
        with_gradients: bool,
    ) -> Result<Vec<Counts>, Error> {
        let config = CommunicatorConfig {
            segment_kb: MESSAGE_KB,
            ..self.settings.collectives.clone()
        };
        let ran = launch::spawn(world, &config, |communicator| {
            let mut replica = Replica::new(stage, self, communicator)?;
            let mut phases = [Allocated::default(); 3];
            let mut report = None;
            for step in 0..3 + usize::from(with_gradients) {
                let (mut kept, mut done) = (None, Ok(()));
                phases[0] = (self.count)(&mut || kept = Some(replica.loss(self.settings)));
                if let Some(loss) = &kept {
                    phases[1] = (self.count)(&mut || done = replica.backward(loss.clone()));
                }
                done?;
                drop(kept);
                report = Some(replica.report()?);
                if step < 3 {
                    let mut done = Ok(());
                    phases[2] = (self.count)(&mut || done = replica.step());
                    done?;
                }
            }
            let mut replica = Some(replica);
            let dropped = (self.count)(&mut || drop(replica.take())).left;
            Ok::<_, zero::Error>(report.map(|report| Counts {
                report,
                dropped: usize::try_from(-dropped).unwrap_or_default(),
                most: phases.map(|phase| usize::try_from(phase.most).unwrap_or(usize::MAX)),
                left: usize::try_from(phases[0].left).unwrap_or_default(),
            }))
        })?;
        Ok(ran.into_iter().flatten().collect())
    }
}

/// A replica, sharded or not.
enum Replica {
    Whole(Box<Whole>),
    Sharded(Box<ShardedDataParallel<Mlp>>),
}

struct Whole {
    model: DistributedDataParallel<Mlp>,
    optimizer: ModuleOptimizer,
    gradients: Option<GradientsParams>,
}

impl Replica {
    fn new(
        stage: Option<Stage>,
        bench: &Bench<'_>,
        communicator: Communicator,
    ) -> zero::Result<Self> {
        // All of a rank's memory is that of its one thread.
        let config = DdpConfig {
            comm_thread: false,
            ..bench.settings.ddp
        };
        let (plain, optimizer) = (bench.plain.clone(), optimizer(&bench.settings.optim));
        Ok(match stage {
            None => Self::Whole(Box::new(Whole {
                model: config.init(plain, communicator)?,
                optimizer,
                gradients: None,
            })),
            Some(stage) => {
                let zero = ZeroConfig::new(stage).with_ddp(config);
                Self::Sharded(Box::new(zero.init(plain, optimizer, communicator)?))
            }
        })
    }

    fn loss(&self, settings: &Settings) -> Tensor<1> {
        match self {
            Self::Whole(whole) => loss(&whole.model, settings),
            Self::Sharded(model) => loss(model, settings),
        }
    }

    fn backward(&mut self, loss: Tensor<1>) -> zero::Result<()> {
        match self {
            Self::Whole(whole) => {
                whole.gradients = Some(whole.model.backward(loss, 1)?);
                Ok(())
            }
            Self::Sharded(model) => model.backward(loss, 1),
        }
    }

    fn step(&mut self) -> zero::Result<()> {
        const RATE: f64 = 1e-4;
        match self {
            Self::Whole(whole) => {
                let gradients = whole.gradients.take().unwrap_or_default();
                Ok(whole.model.step(RATE, &mut whole.optimizer, gradients)?)
            }
            Self::Sharded(model) => model.step(RATE),
        }
    }

    fn report(&self) -> zero::Result<MemoryReport> {
        match self {
            Self::Whole(whole) => {
                let gradients = whole.gradients.as_ref();
                MemoryReport::of_ddp(&whole.model, &whole.optimizer, gradients)
            }
            Self::Sharded(model) => model.memory_report(),
        }
    }
}
