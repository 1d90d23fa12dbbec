//! The same loop, data-parallel and sharded.
use burn::optim::SgdConfig;
use collectives::Communicator;
use examples::Mlp;
use zero::{Result, ZeroConfig};

use super::Digits;

pub(super) fn train(
    digits: &Digits,
    config: ZeroConfig,
    communicator: Communicator,
) -> Result<Mlp> {
    let mut sampler = digits.sampler_of(communicator.place());
    let mut model = config.init(digits.model(), SgdConfig::new().init(), communicator)?;
    for batch in sampler.epoch() {
        let loss = digits.loss(&model, &batch);
        model.backward(loss, batch.samples)?;
        model.step(0.1)?;
    }
    model.into_module()
}
