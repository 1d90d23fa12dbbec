//! f32 and f64, where code is the same for both.
use collectives::Element;

/// f32 or f64.
pub(crate) trait Real:
    Element + Copy + std::ops::Add<Output = Self> + std::ops::Mul<Output = Self> + std::ops::DivAssign
{
    fn from_f64(value: f64) -> Self;
    fn to_f64(self) -> f64;
    fn is_number(self) -> bool;
    /// Whether a sum of 4096 values like it must be a number.
    fn is_modest(self) -> bool;
}

impl Real for f32 {
    fn from_f64(value: f64) -> Self {
        value as f32
    }

    fn to_f64(self) -> f64 {
        self.into()
    }

    fn is_number(self) -> bool {
        self.is_finite()
    }

    fn is_modest(self) -> bool {
        self.abs() < Self::MAX / 8192.0
    }
}

impl Real for f64 {
    fn from_f64(value: f64) -> Self {
        value
    }

    fn to_f64(self) -> f64 {
        self
    }

    fn is_number(self) -> bool {
        self.is_finite()
    }

    fn is_modest(self) -> bool {
        self.abs() < Self::MAX / 8192.0
    }
}

/// Whether all `values` are numbers.
pub(crate) fn are_numbers<T: Real>(values: &[T]) -> bool {
    let strange = |value: &T| u32::from(!value.is_number());
    // Without an early end, so that the loop is vectorised.
    values.iter().map(strange).fold(0, |all, one| all | one) == 0
}

/// Divides `values` by `divisor`.
pub(crate) fn divide<T: Real>(values: &mut [T], divisor: T) {
    values.iter_mut().for_each(|value| *value /= divisor);
}

/// Adds `right` to `left`, element by element.
pub(crate) fn add<T: Real>(left: &mut [T], right: &[T]) {
    for (left, &right) in left.iter_mut().zip(right) {
        *left = *left + right;
    }
}
