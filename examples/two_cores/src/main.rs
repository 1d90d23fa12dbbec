//! One process that trains on all cores: the step that data-parallel ranks must not be slower than.
//!
//! `two_cores LAYERS ROWS OPTIMIZER`, such as `two_cores 784,1024,1024,10 256 momentum`: an MLP with
//! ReLU between its layers, cross-entropy, SGD with momentum 0.9 or `adam`, on made-up rows. Says
//! `ready OPTIMIZER`; then for each line `run K` on standard input it takes one step that does not
//! count and K that do, and answers `seconds S`, the time of those K. `RAYON_NUM_THREADS` says on how
//! many threads.
use std::{
    env,
    io::{BufRead, Write, stdin, stdout},
    process::ExitCode,
    time::Instant,
};

use burn::{
    module::Module,
    nn::{Linear, LinearConfig, loss::CrossEntropyLossConfig},
    optim::{AdamConfig, GradientsParams, ModuleOptimizer, SgdConfig, momentum::MomentumConfig},
    tensor::{Device, Distribution, Int, Tensor, TensorData, activation::relu},
};

#[derive(Module, Debug)]
struct Mlp {
    layers: Vec<Linear>,
}

impl Mlp {
    fn new(widths: &[usize], device: &Device) -> Self {
        let pairs = widths.windows(2);
        let layers = pairs.map(|pair| LinearConfig::new(pair[0], pair[1]).init(device));
        Self {
            layers: layers.collect(),
        }
    }

    fn forward(&self, rows: Tensor<2>) -> Tensor<2> {
        let last = self.layers.len() - 1;
        (self.layers.iter().enumerate()).fold(rows, |inner, (index, layer)| {
            let outer = layer.forward(inner);
            if index < last { relu(outer) } else { outer }
        })
    }
}

fn main() -> ExitCode {
    match arguments() {
        Some(asked) => serve(asked),
        None => {
            eprintln!(
                "usage: two_cores LAYERS ROWS OPTIMIZER, such as two_cores 784,1024,1024,10 256 momentum, or adam"
            );
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}

struct Asked {
    widths: Vec<usize>,
    rows: usize,
    name: String,
    optimizer: ModuleOptimizer,
    rate: f64,
}

fn arguments() -> Option<Asked> {
    let mut words = env::args().skip(1);
    let widths: Result<Vec<usize>, _> = words.next()?.split(',').map(str::parse).collect();
    let widths = widths
        .ok()
        .filter(|widths| widths.len() > 1 && !widths.contains(&0))?;
    let rows = words.next()?.parse().ok().filter(|&rows| rows > 0)?;
    let name = words.next()?;
    // PyTorch's constants, where Burn has others.
    let (optimizer, rate) = match name.as_str() {
        "momentum" => {
            let momentum = MomentumConfig::new().with_momentum(0.9).with_dampening(0.0);
            (SgdConfig::new().with_momentum(Some(momentum)).init(), 0.01)
        }
        "adam" => (AdamConfig::new().with_epsilon(1e-8).init(), 0.001),
        _ => return None,
    };
    Some(Asked {
        widths,
        rows,
        name,
        optimizer,
        rate,
    })
}

fn serve(asked: Asked) {
    let Asked {
        widths,
        rows,
        name,
        mut optimizer,
        rate,
    } = asked;
    let device = Device::flex().autodiff();
    let classes = widths[widths.len() - 1];
    let features =
        Tensor::<2>::random([rows, widths[0]], Distribution::Uniform(-1.0, 1.0), &device);
    let targets: Vec<i64> = (0..rows).map(|row| (row % classes) as i64).collect();
    let targets = Tensor::<1, Int>::from_data(TensorData::new(targets, [rows]), &device);
    let criterion = CrossEntropyLossConfig::new().init(&device);
    let mut model = Some(Mlp::new(&widths, &device));
    let mut step = || {
        if let Some(before) = model.take() {
            let loss = criterion.forward(before.forward(features.clone()), targets.clone());
            let gradients = GradientsParams::from_grads(loss.backward(), &before);
            model = Some(optimizer.step(rate, before, gradients));
        }
    };
    say(&format!("ready {name}"));
    for line in stdin().lock().lines().map_while(Result::ok) {
        let Some(Ok(steps)) = line.strip_prefix("run ").map(str::parse::<usize>) else {
            eprintln!("\"{line}\" is no order; `run K` is");
            continue;
        };
        step();
        let start = Instant::now();
        (0..steps).for_each(|_| step());
        say(&format!("seconds {}", start.elapsed().as_secs_f64()));
    }
}

/// Whoever asked may have gone; then the input ends too.
fn say(answer: &str) {
    let mut output = stdout().lock();
    drop(writeln!(output, "{answer}").and_then(|()| output.flush()));
}
