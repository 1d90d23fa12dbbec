//! The model: linear layers with ReLU between. It knows nothing of ranks.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::{DType, Device, Tensor, TensorData, activation::relu};

use crate::{Precision, SplitMix64};

/// A multilayer perceptron.
#[derive(Module, Debug)]
pub struct Mlp {
    layers: Vec<Linear>,
}

impl Mlp {
    /// Layers of the widths in `widths` (features first, classes last), with
    /// weights and biases uniform in ±1/sqrt(fan_in), as Burn and PyTorch do
    /// by default. They come from a generator of our own, in a fixed order, so
    /// every call with the same seed gives the same bits; in f32 they are the
    /// f64 ones, rounded.
    ///
    /// # Panics
    /// With fewer than two widths, which is a caller's mistake.
    ///
    /// ```
    /// use burn::module::Module;
    /// use burn::tensor::Device;
    /// use examples::{Mlp, Precision};
    ///
    /// let device = Device::flex().autodiff();
    /// let model = Mlp::new(&[64, 128, 10], 7, Precision::F32, &device);
    /// assert_eq!(model.num_params(), 64 * 128 + 128 + 128 * 10 + 10);
    /// ```
    pub fn new(widths: &[usize], seed: u64, precision: Precision, device: &Device) -> Self {
        assert!(widths.len() >= 2, "a layer needs two widths");
        let mut random = SplitMix64::new(seed);
        let layers = widths
            .windows(2)
            .map(|pair| {
                let [fan_in, fan_out] = [pair[0], pair[1]];
                let bound = 1.0 / (fan_in as f64).sqrt();
                let mut draw = |count: usize| -> Vec<f64> {
                    (0..count).map(|_| random.uniform(-bound, bound)).collect()
                };
                let weight = draw(fan_in * fan_out);
                let bias = draw(fan_out);
                Linear {
                    weight: Param::from_tensor(tensor(
                        weight,
                        [fan_in, fan_out],
                        precision,
                        device,
                    )),
                    bias: Some(Param::from_tensor(tensor(
                        bias,
                        [fan_out],
                        precision,
                        device,
                    ))),
                }
            })
            .collect();
        Self { layers }
    }

    /// Logits `[rows, classes]` of features `[rows, features]`.
    pub fn forward(&self, features: Tensor<2>) -> Tensor<2> {
        let (last, hidden) = self.layers.split_last().expect("at least one layer");
        let hidden = hidden
            .iter()
            .fold(features, |inner, layer| relu(layer.forward(inner)));
        last.forward(hidden)
    }
}

/// A float tensor of the wanted precision, whatever the device's default is.
pub(crate) fn tensor<const D: usize>(
    values: Vec<f64>,
    shape: [usize; D],
    precision: Precision,
    device: &Device,
) -> Tensor<D> {
    match precision {
        Precision::F32 => {
            let values: Vec<f32> = values.into_iter().map(|value| value as f32).collect();
            Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))
        }
        Precision::F64 => Tensor::from_data(TensorData::new(values, shape), (device, DType::F64)),
    }
}
