//! Data-parallel training in which no rank holds what another one holds already.
//!
//! Each rank of [`ddp`] keeps the whole optimizer's state, though all of them keep the same.
//! Here every rank owns a part of every bucket, of equal size, and steps that alone; afterwards the
//! parts are gathered. What is sharded is one number, the [`Stage`]; the loop stays as it is.
//!
//! ```
//! use burn::nn::LinearConfig;
//! use burn::optim::AdamConfig;
//! use burn::tensor::{Device, Tensor};
//! use collectives::{CommunicatorConfig, launch};
//! use zero::{Stage, ZeroConfig};
//!
//! let weights = launch::spawn(2, &CommunicatorConfig::new(), |communicator| {
//!     let rank = communicator.rank() as f32;
//!     let device = Device::flex().autodiff();
//!     let model = LinearConfig::new(3, 1).init(&device);
//!     let config = ZeroConfig::new(Stage::Two);
//!     let mut model = config.init(model, AdamConfig::new().init(), communicator)?;
//!     for _ in 0..3 {
//!         let input = Tensor::<2>::ones([4, 3], &device) * (rank + 1.0);
//!         let loss = model.forward(input).mean();
//!         model.backward(loss, 4)?;
//!         model.step(0.1)?;
//!     }
//!     Ok::<_, zero::Error>(model.into_module()?.weight.val().into_data())
//! })?;
//! assert_eq!(weights[0], weights[1]);
//! # Ok::<(), collectives::launch::LaunchError>(())
//! ```
//!
//! The optimizer is Burn's own, on pieces of parameters. That gives the same bits as on whole ones
//! if it treats every element alike, as SGD, Adam, AdamW, RMSProp, AdaGrad, Lion and Adan do; one that
//! does not is found out by a trial, and refused with its name and that of a parameter. LBFGS steps no
//! parameter by itself, and does not compile here:
//!
//! ```compile_fail,E0308
//! # use burn::{module::Param, optim::LBFGSConfig, tensor::Tensor};
//! # fn init(weight: Param<Tensor<1>>, communicator: collectives::Communicator) {
//! let config = zero::ZeroConfig::new(zero::Stage::One);
//! let model = config.init(weight, LBFGSConfig::new().init(), communicator);
//! # }
//! ```
mod checkpoint;
mod config;
mod error;
mod flats;
mod memory;
mod pieces;
mod sharded;
mod shards;
mod state;
mod trial;
mod vault;

pub use config::{Stage, ZeroConfig};
pub use error::{Error, Result};
pub use memory::{Memory, MemoryReport, Peak, memory_table};
pub use sharded::ShardedDataParallel;
