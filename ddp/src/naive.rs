//! Data-parallel training at its plainest: the readable oracle of the tests.
//!
//! After an ordinary backward pass, one all-reduce per parameter, one after the other. No hooks,
//! no buckets, no overlap, no threads. Slow, and easy to believe.
//!
//! Every rank starts from the same values (one record, say) in leaves of its own. The same seed
//! on every rank does not do it: Burn's belongs to the process, and threads mix their draws.
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Element, Gradients, Tensor, TensorData};
use collectives::{Communicator, ReduceOp};

use crate::{Error, Result};

/// Runs the backward pass of `loss`, the mean over this rank's `samples`, and returns the mean
/// gradients and loss over the samples of all ranks.
///
/// A parameter that no rank used has no gradient. A rank with 0 samples contributes zeros.
///
/// ```
/// use burn::module::Param;
/// use burn::tensor::{Device, Tensor};
/// use collectives::{CommunicatorConfig, launch};
///
/// let gradients = launch::spawn(2, &CommunicatorConfig::new(), |mut communicator| {
///     let device = Device::flex().autodiff();
///     let weight = Param::from_tensor(Tensor::<1>::from_floats([0.0], &device));
///     let loss = weight.val().mul_scalar(communicator.rank() as f32 + 1.0);
///     let (gradients, _) = ddp::naive::backward(&weight, loss, 1, &mut communicator)?;
///     Ok::<_, ddp::Error>(gradients.get::<1>(weight.id).unwrap().into_scalar::<f32>())
/// })?;
/// assert_eq!(gradients, [1.5, 1.5]);
/// # Ok::<(), collectives::launch::LaunchError>(())
/// ```
pub fn backward<M: Module, const D: usize>(
    module: &M,
    loss: Tensor<D>,
    samples: usize,
    communicator: &mut Communicator,
) -> Result<(GradientsParams, f64)> {
    let mut totals = [samples as f64, 0.0];
    if samples > 0 {
        let loss = loss.clone().inner().into_data().iter::<f64>().sum::<f64>();
        totals[1] = loss * samples as f64;
    }
    communicator.all_reduce(&mut totals, ReduceOp::Sum)?;
    let [total, loss_sum] = totals;
    if total == 0.0 {
        return Err(Error::NoSamples);
    }
    // One rank alone has the mean already: times n and by n would round it.
    let alone = communicator.world_size() == 1;
    let mut average = Average {
        local: loss.backward(),
        samples: if alone { 1 } else { samples },
        total: if alone { 1.0 } else { total },
        communicator,
        mean: GradientsParams::new(),
        result: Ok(()),
    };
    module.visit(&mut average);
    average.result?;
    Ok((average.mean, loss_sum / total))
}

struct Average<'a> {
    local: Gradients,
    samples: usize,
    total: f64,
    communicator: &'a mut Communicator,
    mean: GradientsParams,
    result: Result<()>,
}

impl ModuleVisitor for Average<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.result.is_ok() && param.is_require_grad() {
            self.result = match param.dtype() {
                DType::F32 => self.average::<D, f32>(param),
                DType::F64 => self.average::<D, f64>(param),
                other => Err(Error::UnsupportedDtype {
                    parameter: param.id.to_string(),
                    dtype: format!("{other:?}"),
                }),
            };
        }
    }
}

impl Average<'_> {
    fn average<const D: usize, T>(&mut self, param: &Param<Tensor<D>>) -> Result<()>
    where
        T: Element + collectives::Element + Weight,
    {
        let shape = param.dims();
        let local = param.base().grad(&self.local).filter(|_| self.samples > 0);
        let mut used = [u64::from(local.is_some())];
        let mut sum = match local {
            Some(gradient) => gradient.into_data().iter::<T>().collect(),
            None => vec![T::weight(0.0); shape.iter().product()],
        };
        let samples = T::weight(self.samples as f64);
        sum.iter_mut().for_each(|value| *value = *value * samples);
        self.communicator.all_reduce(&mut used, ReduceOp::Sum)?;
        self.communicator.all_reduce(&mut sum, ReduceOp::Sum)?;
        if used[0] > 0 {
            let total = T::weight(self.total);
            sum.iter_mut().for_each(|value| *value = *value / total);
            let device = param.device().inner();
            let mean = Tensor::from_data(TensorData::new(sum, shape), (&device, param.dtype()));
            self.mean.register::<D>(param.id, mean);
        }
        Ok(())
    }
}

/// A float to weigh gradients with.
trait Weight: Copy + std::ops::Mul<Output = Self> + std::ops::Div<Output = Self> {
    fn weight(value: f64) -> Self;
}

impl Weight for f32 {
    fn weight(value: f64) -> Self {
        value as f32
    }
}

impl Weight for f64 {
    fn weight(value: f64) -> Self {
        value
    }
}
