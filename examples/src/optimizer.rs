//! The optimizer that the settings name, with PyTorch's constants.

use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, AdamWConfig, ModuleOptimizer, SgdConfig};

use crate::{Optim, OptimizerKind};

/// PyTorch's epsilon for Adam; Burn 0.22.1 has 1e-5.
const ADAM_EPSILON: f32 = 1e-8;
/// PyTorch's dampening; Burn 0.22.1 has 0.1.
const DAMPENING: f64 = 0.0;

/// Builds the optimizer.
///
/// Where Burn's defaults differ from PyTorch's, PyTorch's are set: epsilon
/// 1e-8 in Adam and AdamW (Burn: 1e-5), dampening 0 in momentum (Burn: 0.1),
/// weight decay as configured in AdamW, 0 by default (Burn: 1e-4).
///
/// ```
/// use examples::{Settings, optimizer};
///
/// let optim = optimizer(&Settings::train().optim);
/// assert!(!optim.has_gradient_clipping());
/// ```
pub fn optimizer(optim: &Optim) -> ModuleOptimizer {
    let decay = (optim.weight_decay > 0.0).then_some(WeightDecayConfig {
        penalty: optim.weight_decay as f32,
    });
    match optim.kind {
        OptimizerKind::Sgd => SgdConfig::new().with_weight_decay(decay).init(),
        OptimizerKind::Momentum => SgdConfig::new()
            .with_weight_decay(decay)
            .with_momentum(Some(
                MomentumConfig::new()
                    .with_momentum(optim.momentum)
                    .with_dampening(DAMPENING),
            ))
            .init(),
        OptimizerKind::Adam => AdamConfig::new()
            .with_epsilon(ADAM_EPSILON)
            .with_weight_decay(decay)
            .init(),
        OptimizerKind::AdamW => AdamWConfig::new()
            .with_epsilon(ADAM_EPSILON)
            .with_weight_decay(optim.weight_decay as f32)
            .init(),
    }
}
