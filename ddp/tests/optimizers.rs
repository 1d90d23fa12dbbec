//! Every optimizer of Burn 0.22.1 trains on N ranks as on one.
//!
//! In f64, and by the derived bound of `positive`. What is derived here is how much each
//! optimizer makes of a relative error g of the gradients: with positive gradients a moving
//! average of them has the error g, one of their squares 2 g, its root g, a quotient the sum.
use burn::grad_clipping::GradientClippingConfig;
use burn::module::{Module, Param, ParamGroup};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdaGradConfig, AdafactorConfig, AdamConfig, AdamWConfig, AdanConfig, GradientsParams,
    LBFGSConfig, LambConfig, LineSearchFn, LionConfig, ModuleOptimizer, MuonConfig, RmsPropConfig,
    SgdConfig,
};
use burn::tensor::{DType, Tensor};
use ddp::{DdpConfig, DistributedDataParallel};

use crate::positive::{Positive, Sensitivity, Size, Trial, lift, table};
use crate::support::{Mlp, from_vec, ranks};

/// Two layers, 4 to 5 to 3, through whose ReLU everything passes.
impl Positive for Mlp {
    const DEGREE: f64 = 2.0;

    /// Forward 4 + 1 and 5 + 1, the target 1, the square and its mean 6; backward 3 + 1, then
    /// 8 + 1 over the rows; weight, sum over ranks and mean 1 + 3 + 1: 35.
    const ROUNDINGS: f64 = 40.0;

    fn output(&self, rows: &[usize]) -> Tensor<2> {
        self.forward(table(1000, rows, [rows.len(), 4], 1.0, 1.25))
    }
}

fn mlp() -> Mlp {
    lift(Mlp::new(&[4, 5, 3], DType::F64))
}

fn check(
    name: &str,
    rate: f64,
    sensitivity: Sensitivity,
    optimizer: fn() -> ModuleOptimizer,
) -> crate::positive::Single {
    let trial = Trial {
        model: mlp,
        optimizer,
        rate,
        sensitivity,
    };
    trial.check(name)
}

fn momentum(nesterov: bool) -> Option<MomentumConfig> {
    let plain = MomentumConfig::new().with_dampening(0.0);
    Some(plain.with_nesterov(nesterov))
}

fn decay() -> Option<WeightDecayConfig> {
    Some(WeightDecayConfig::new(0.1))
}

#[test]
fn sgd_its_momentum_and_its_weight_decay_equal_one_process() {
    // Sums of gradients, and of weights, whose error is not above that of the gradients.
    let one = Sensitivity::relative(1.0);
    check("sgd", 0.01, one, || SgdConfig::new().init());
    check("momentum", 0.003, one, || {
        SgdConfig::new().with_momentum(momentum(false)).init()
    });
    check("nesterov", 0.003, one, || {
        SgdConfig::new()
            .with_momentum(momentum(true))
            .with_weight_decay(decay())
            .init()
    });
}

#[test]
fn clipping_by_burns_optimizers_equals_one_process() {
    // A gradient over its norm: g each. A clamp: not above g.
    check("norm", 0.1, Sensitivity::relative(2.0), || {
        let clipping = GradientClippingConfig::Norm(0.5);
        SgdConfig::new()
            .with_gradient_clipping(Some(clipping))
            .init()
    });
    check("value", 0.01, Sensitivity::relative(1.0), || {
        let clipping = GradientClippingConfig::Value(1.0);
        SgdConfig::new()
            .with_gradient_clipping(Some(clipping))
            .init()
    });
}

#[test]
fn adam_and_its_relatives_equal_one_process() {
    // An average of gradients over the root of one of their squares: g + g. The largest of
    // several second moments has the error of one of them.
    let two = Sensitivity::relative(2.0);
    check("adam", 0.01, two, || AdamConfig::new().init());
    check("amsgrad", 0.01, two, || {
        AdamConfig::new()
            .with_amsgrad(true)
            .with_weight_decay(decay())
            .init()
    });
    check("adamw", 0.01, two, || {
        AdamWConfig::new().with_weight_decay(0.1).init()
    });
    check("cautious adamw", 0.01, two, || {
        AdamWConfig::new()
            .with_weight_decay(0.1)
            .with_cautious_weight_decay(true)
            .with_amsgrad(true)
            .init()
    });
}

#[test]
fn adagrad_and_rmsprop_equal_one_process() {
    let two = Sensitivity::relative(2.0);
    check("adagrad", 0.01, two, || {
        AdaGradConfig::new().with_lr_decay(0.1).init()
    });
    check("rmsprop", 0.0005, two, || RmsPropConfig::new().init());
    // Centered: the mean square v less the squared mean, at most q v with q = 1 - 0.99^6 = 0.059
    // by Cauchy and Schwarz. Each has the error 2 g, so their difference (1 + q) / (1 - q) times
    // that, its root half: 1.13 g, below the gradient's g.
    check(
        "centered rmsprop",
        0.0005,
        Sensitivity::relative(2.2),
        || RmsPropConfig::new().with_centered(true).init(),
    );
}

#[test]
fn lion_takes_signs_and_equals_one_process_to_the_bit() {
    let lion = || LionConfig::new().with_weight_decay(0.1).init();
    let trial = Trial {
        model: mlp,
        optimizer: lion,
        rate: 0.01,
        sensitivity: Sensitivity::relative(0.0),
    };
    let single = trial.single();
    for world in 1..=4 {
        for weights in trial.ddp(world, DdpConfig::new()) {
            assert_eq!(weights, single.weights, "{world} ranks");
        }
    }
}

#[test]
fn adan_equals_one_process() {
    // Adan sees differences of gradients, d = g1 - g0, whose error is at most 2 g times the largest
    // gradient G. With c = 0.92 its numerator, an average of gradients and c times one of differences,
    // has the error (1 + 2 c) G g, and so has the root of the average of (g1 + c d)^2, a norm.
    // If G is at most R times the smallest gradient, the numerator is at most R + c (R - 1) and
    // the root at least h = 1 - c (R - 1), in units of the smallest:
    //   (1 + 2 c) R / h x (1 + (R + c (R - 1)) / h) = 16.2 at R = 1.3.
    let sensitivity = Sensitivity {
        amplification: 16.2,
        roundings: 16.2 * 128.0,
        size: Size::Rate,
    };
    let single = check("adan", 0.01, sensitivity, || {
        AdanConfig::new().with_weight_decay(0.1).init()
    });
    assert!(single.swing <= 1.3, "{}", single.swing);
}

#[test]
fn lamb_and_adafactor_equal_one_process() {
    // Adam's quotient, 2 g; the ratio of the weight's norm and that quotient's, 1 g and 2 g.
    check("lamb", 0.02, Sensitivity::relative(5.0), || {
        LambConfig::new().with_weight_decay(0.1).init()
    });
    // Squares 2 g and their averages too; a row over the mean of rows 4 g, the root 2 g; the
    // column's root g; so a gradient over both g + 2 g + g. That over its own norm: twice. And
    // the weight's norm: g.
    check("adafactor", 0.02, Sensitivity::relative(9.0), || {
        AdafactorConfig::new().with_weight_decay(0.1).init()
    });
}

#[test]
fn muon_on_matrices_beside_sgd_on_biases_equals_one_process() {
    // Five times p(x) = 3.4445 x - 4.775 x^3 + 2.0315 x^5 of the singular values of a gradient
    // over its norm, so 2 g at first. The derivative of such a function of a matrix is bounded by
    // that of p between the negative and the positive largest singular value (Noferini, "A formula
    // for the Fréchet derivative of a generalized matrix function", 2017, theorem 4.4). These are
    // at most 1, then at most max p = 1.21; |p'| is at most 3.45 up to 1, and 4.3 up to 1.21.
    // Tall matrices are stepped further: sqrt(5 / 3) = 1.3.
    let amplification = 2.0 * 3.45 * 4.3f64.powi(4) * 1.3;
    // A product of 5 x 5 has 5 roundings an element, in Frobenius norm at most sqrt(5) times as
    // many: 3 products and 6 more roundings of values below 18 (3.4445 x 1.21 + 4.775 x 1.21^3 +
    // 2.0315 x 1.21^5 = 18) in a round, which the rounds after it amplify.
    let round = 18.0 * (3.0 * 5.0 + 6.0) * 5f64.sqrt();
    let later: f64 = (0..5).map(|rounds| 4.3f64.powi(rounds)).sum();
    let sensitivity = Sensitivity {
        amplification,
        roundings: 1.3 * round * later + 128.0,
        size: Size::Rate,
    };
    let single = check("muon", 1e-4, sensitivity, || {
        let weights = ParamGroup::from_predicate("weight");
        ModuleOptimizer::from(SgdConfig::new().build()).with_group(
            weights,
            MuonConfig::new().build(),
            None,
        )
    });
    // Biases are in the bound by their own size: gradients of about 1 at the same rate.
    assert!(single.swing < 2.0);
}

/// Least squares with a known curvature: the k-th weight is scaled by k + 1.
#[derive(Module, Debug)]
struct Squares {
    weight: Param<Tensor<1>>,
}

impl Squares {
    const WEIGHTS: usize = 6;

    /// The mean over `rows` of the squared distance of the scaled weights from a row's targets.
    fn loss(&self, rows: &[usize]) -> Tensor<1> {
        let scale = (1..=Self::WEIGHTS).map(|scale| scale as f64).collect();
        let scaled = self.weight.val() * from_vec(scale, [Self::WEIGHTS], DType::F64);
        let shape = [rows.len(), Self::WEIGHTS];
        let error = scaled.unsqueeze::<2>() - table(3000, rows, shape, -1.0, 1.0);
        (error.clone() * error).sum_dim(1).mean()
    }

    fn new() -> Self {
        let zeros = from_vec(vec![0.0; Self::WEIGHTS], [Self::WEIGHTS], DType::F64);
        Self {
            weight: Param::from_tensor(zeros),
        }
    }

    /// The gradient's norm over all rows, in plain f64.
    fn slope(&self, rows: &[usize]) -> f64 {
        let weight: Vec<f64> = self.weight.base().into_data().iter().collect();
        let targets: Vec<f64> = table(3000, rows, [rows.len(), Self::WEIGHTS], -1.0, 1.0)
            .into_data()
            .iter()
            .collect();
        let slopes = weight.iter().enumerate().map(|(at, weight)| {
            let scale = (at + 1) as f64;
            let errors = targets
                .iter()
                .skip(at)
                .step_by(Self::WEIGHTS)
                .map(|target| weight * scale - target);
            2.0 * scale * errors.sum::<f64>() / rows.len() as f64
        });
        slopes.map(|slope| slope * slope).sum::<f64>().sqrt()
    }
}

/// LBFGS calls for the loss and its gradient again and again, at weights of its own choice: each
/// time they go into the replica by `update`, and the gradient comes out of `backward`.
#[test]
fn lbfgs_through_update_finds_the_optimum_that_one_process_finds() {
    let rows: Vec<usize> = (0..10).collect();
    let config = LBFGSConfig::new()
        .with_line_search_fn(LineSearchFn::StrongWolfe)
        .with_max_iter(40)
        .with_tolerance_change(1e-20);
    let (single, _) = config.init().step(1.0, Squares::new(), |module| {
        let loss = module.loss(&rows);
        let value = loss.clone().into_scalar::<f64>();
        let gradients = GradientsParams::from_grads(loss.backward(), &module);
        (value, gradients)
    });
    for world in 1..=4 {
        let found = ranks(world, |communicator| {
            let part = communicator.part(rows.len());
            let mut model: DistributedDataParallel<Squares> =
                DdpConfig::new().init(Squares::new(), communicator)?;
            let start = model.module().clone();
            let mut failed = None;
            let (end, _) = config.init().step(1.0, start, |module| {
                model.update(|_| module);
                let loss = model.loss(&rows[part.clone()]);
                match model.backward(loss, part.len()) {
                    Ok(gradients) => (model.last_step().loss, gradients),
                    Err(error) => {
                        failed = Some(error);
                        (0.0, GradientsParams::new())
                    }
                }
            });
            model.update(|_| end);
            match failed {
                Some(error) => Err(error),
                None => Ok(model.into_module()),
            }
        });
        // The curvature is at least 2, the smallest scale squared twice, so that a point lies no
        // further from the optimum than half its slope.
        let slope = single.slope(&rows);
        assert!(slope < 1e-6, "one process did not arrive: {slope:e}");
        let values = |module: &Squares| -> Vec<f64> {
            let weight = module.weight.base();
            weight.into_data().iter().collect()
        };
        for module in &found {
            assert_eq!(values(module), values(&found[0]));
            assert!(module.slope(&rows) < 1e-6, "{world} ranks did not arrive");
            let bound = (slope + module.slope(&rows)) / 2.0;
            let pairs = values(module).into_iter().zip(values(&single));
            let far = pairs.map(|(a, b)| (a - b) * (a - b)).sum::<f64>().sqrt();
            assert!(
                far <= bound + 1e-15,
                "{world} ranks: {far:e} away, at most {bound:e}"
            );
        }
    }
}
