//! f32 and f64, where code is the same for both.
use collectives::Element;

/// f32 or f64.
pub(crate) trait Real:
    Element + Copy + std::ops::Add<Output = Self> + std::ops::Mul<Output = Self> + std::ops::DivAssign
{
    fn from_f64(value: f64) -> Self;
    fn to_f64(self) -> f64;
    fn is_number(self) -> bool;
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
}

/// Adds `right` to `left`, element by element.
pub(crate) fn add<T: Real>(left: &mut [T], right: &[T]) {
    for (left, &right) in left.iter_mut().zip(right) {
        *left = *left + right;
    }
}
