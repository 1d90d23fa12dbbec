//! A plain Burn training loop.
use burn::optim::{GradientsParams, SgdConfig};
use examples::Mlp;

use super::Digits;

pub(super) fn train(digits: &Digits) -> Mlp {
    let mut sampler = digits.sampler();
    let mut model = digits.model();
    let mut optimizer = SgdConfig::new().init();
    for batch in sampler.epoch() {
        let loss = digits.loss(&model, &batch);
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(0.1, model, gradients);
    }
    model
}
