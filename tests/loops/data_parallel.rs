//! The same loop, data-parallel.
use burn::optim::SgdConfig;
use collectives::Communicator;
use ddp::DdpConfig;
use examples::Mlp;

use super::Digits;

pub(super) fn train(digits: &Digits, communicator: Communicator) -> ddp::Result<Mlp> {
    let mut sampler = digits.sampler_of(communicator.place());
    let mut model = DdpConfig::new().init(digits.model(), communicator)?;
    let mut optimizer = SgdConfig::new().init();
    for batch in sampler.epoch() {
        let loss = digits.loss(&model, &batch);
        let gradients = model.backward(loss, batch.samples)?;
        model.step(0.1, &mut optimizer, gradients)?;
    }
    Ok(model.into_module())
}
