//! Data-parallel training of Burn modules: the same model on every rank, each on its own samples.
//!
//! [`DistributedDataParallel`] wraps any module. Its [`backward`](DistributedDataParallel::backward)
//! takes the place of Burn's; the gradients it returns are the means over all ranks, and most of
//! the communication is over by the time the backward pass is.
//!
//! ```
//! use burn::nn::LinearConfig;
//! use burn::optim::SgdConfig;
//! use burn::tensor::{Device, Tensor};
//! use collectives::{CommunicatorConfig, launch};
//! use ddp::DdpConfig;
//!
//! let weights = launch::spawn(2, &CommunicatorConfig::new(), |communicator| {
//!     let rank = communicator.rank() as f32;
//!     let device = Device::flex().autodiff();
//!     let model = LinearConfig::new(3, 1).init(&device);
//!     let mut model = DdpConfig::new().init(model, communicator)?;
//!     let mut optimizer = SgdConfig::new().init();
//!     for _ in 0..3 {
//!         let input = Tensor::<2>::ones([4, 3], &device) * (rank + 1.0);
//!         let loss = model.forward(input).mean();
//!         let gradients = model.backward(loss, 4)?;
//!         model.step(0.1, &mut optimizer, gradients)?;
//!     }
//!     Ok::<_, ddp::Error>(model.into_module().weight.val().into_data())
//! })?;
//! // Each rank began with its own random weights and saw its own input; now they agree to the bit.
//! assert_eq!(weights[0], weights[1]);
//! # Ok::<(), collectives::launch::LaunchError>(())
//! ```
//!
//! The path of a gradient: the tap behind `Param::val()` copies it into a bucket, the [`Reducer`]
//! hands a full bucket to a [`CommStream`](collectives::CommStream), and the optimizer gets views
//! of what comes back. [`naive`] does the same in the plainest way, and is what tests compare with.
mod bucket;
mod buffer;
mod buffers;
mod config;
mod data_parallel;
mod error;
mod exact;
mod exchange;
mod hash;
mod hook;
mod loan;
mod norm;
mod parcel;
mod platform;
mod real;
mod record;
mod reducer;
mod replica;
mod replicas;
mod sampler;
mod shards;
mod slots;
mod tap;
mod unpack;

pub mod naive;

pub use bucket::{BucketPlan, Caps, Float, SlotSpec};
pub use buffer::{Buffer, Gradient};
pub use config::DdpConfig;
pub use data_parallel::DistributedDataParallel;
pub use error::{Error, Result};
pub use hook::{AllReduce, Bf16Compress, BucketSums, CommHook, Fp16Compress, Hook, Noop, Values};
pub use loan::{Failure, Lender};
pub use record::{BucketRecord, StepRecord};
pub use reducer::{Keep, Progress, Reduced, Reducer};
pub use replica::{Means, Order, Replica, Terms};
pub use sampler::{Batch, DistributedSampler};
pub use shards::Shards;
pub use slots::Slots;
pub use unpack::{flat, reclaim};
