//! Gradients as plain numbers.
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::bucket::Float;
use crate::real::{self, Real};

/// A gradient as the backward pass hands it over.
#[derive(Clone, Copy, Debug)]
pub enum Gradient<'a> {
    /// Of an f32 parameter.
    F32(&'a [f32]),
    /// Of an f64 parameter.
    F64(&'a [f64]),
}

/// The memory of one bucket.
#[derive(Clone, Debug, PartialEq)]
pub enum Buffer {
    /// Of f32 parameters.
    F32(Vec<f32>),
    /// Of f64 parameters.
    F64(Vec<f64>),
}

/// How large values are, the largest of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Size {
    /// A sum over all ranks and shards cannot overflow.
    Modest,
    /// It may.
    Huge,
    /// A gradient was infinite or NaN.
    NoNumber,
}

impl Gradient<'_> {
    pub(crate) fn describe(self) -> String {
        match self {
            Self::F32(values) => format!("{} x f32", values.len()),
            Self::F64(values) => format!("{} x f64", values.len()),
        }
    }
}

impl Buffer {
    /// The values, if they are f32.
    pub fn as_f32(&self) -> Option<&[f32]> {
        match self {
            Self::F32(values) => Some(values),
            Self::F64(_) => None,
        }
    }

    /// The values, if they are f64.
    pub fn as_f64(&self) -> Option<&[f64]> {
        match self {
            Self::F32(_) => None,
            Self::F64(values) => Some(values),
        }
    }

    /// A buffer of zeros.
    ///
    /// ```
    /// use ddp::{Buffer, Float};
    /// assert_eq!(Buffer::zeros(Float::F32, 2).as_f32(), Some(&[0.0, 0.0][..]));
    /// ```
    pub fn zeros(dtype: Float, len: usize) -> Self {
        match dtype {
            Float::F32 => Self::F32(vec![0.0; len]),
            Float::F64 => Self::F64(vec![0.0; len]),
        }
    }

    fn capacity(&self) -> usize {
        match self {
            Self::F32(values) => values.capacity(),
            Self::F64(values) => values.capacity(),
        }
    }

    fn resize(&mut self, len: usize) {
        match self {
            Self::F32(values) => values.resize(len, 0.0),
            Self::F64(values) => values.resize(len, 0.0),
        }
    }

    /// How many values there are.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::F64(values) => values.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Their type.
    pub fn dtype(&self) -> Float {
        match self {
            Self::F32(_) => Float::F32,
            Self::F64(_) => Float::F64,
        }
    }

    /// A copy of some of them.
    ///
    /// # Panics
    ///
    /// If `range` goes beyond them.
    pub fn part(&self, range: Range<usize>) -> Self {
        match self {
            Self::F32(values) => Self::F32(values[range].to_vec()),
            Self::F64(values) => Self::F64(values[range].to_vec()),
        }
    }

    pub(crate) fn fill(&mut self, range: Range<usize>, value: f64) {
        match self {
            Self::F32(values) => values[range].fill(value as f32),
            Self::F64(values) => values[range].fill(value),
        }
    }

    /// Whether the values of `range` are all numbers.
    pub(crate) fn is_finite(&self, range: Range<usize>) -> bool {
        match self {
            Self::F32(values) => real::are_numbers(&values[range]),
            Self::F64(values) => real::are_numbers(&values[range]),
        }
    }

    pub(crate) fn at(&self, index: usize) -> f64 {
        match self {
            Self::F32(values) => values[index].into(),
            Self::F64(values) => values[index],
        }
    }

    /// Adds `other`, of the same type and length.
    pub(crate) fn add(&mut self, other: &Self) {
        match (self, other) {
            (Self::F32(left), Self::F32(right)) => real::add(left, right),
            (Self::F64(left), Self::F64(right)) => real::add(left, right),
            _ => unreachable!("buffers of one bucket have one type"),
        }
    }

    pub(crate) fn scale(&mut self, range: Range<usize>, factor: f64) {
        match self {
            Self::F32(values) => values[range].iter_mut().for_each(|x| *x *= factor as f32),
            Self::F64(values) => values[range].iter_mut().for_each(|x| *x *= factor),
        }
    }

    /// Puts `gradient`, a mean over `samples`, to `range` as a sum over them, or adds it to what
    /// is there. None if it is not of that type and length.
    pub(crate) fn take_in(
        &mut self,
        range: Range<usize>,
        gradient: Gradient<'_>,
        samples: usize,
        onto: bool,
    ) -> Option<Size> {
        match (self, gradient) {
            (Self::F32(values), Gradient::F32(gradient)) if gradient.len() == range.len() => {
                Some(weigh(&mut values[range], gradient, samples, onto))
            }
            (Self::F64(values), Gradient::F64(gradient)) if gradient.len() == range.len() => {
                Some(weigh(&mut values[range], gradient, samples, onto))
            }
            _ => None,
        }
    }
}

/// Buffers that wait to be used again, shared with the communication thread.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pool(Arc<Mutex<Vec<Buffer>>>);

impl Pool {
    /// One of that type and length, with old values in it, or a new one of zeros.
    pub(crate) fn take(&self, dtype: Float, len: usize) -> Buffer {
        let fits = |buffer: &Buffer| buffer.dtype() == dtype && buffer.len() == len;
        let mut waiting = self.lock();
        match waiting.iter().position(fits) {
            Some(at) => waiting.swap_remove(at),
            None => Buffer::zeros(dtype, len),
        }
    }

    /// As [`take`](Self::take), but any that is large enough will do, and a new one has room for
    /// `tail` values more. If none is, those that wait would be in vain, and are let go.
    pub(crate) fn take_room(&self, dtype: Float, len: usize, tail: usize) -> Buffer {
        let mut waiting = self.lock();
        let mut large = waiting.iter().enumerate();
        let large = large.find(|(_, one)| one.dtype() == dtype && one.capacity() >= len);
        let mut buffer = match large.map(|(at, _)| at) {
            Some(at) => waiting.swap_remove(at),
            None => {
                waiting.retain(|one| one.dtype() != dtype);
                Buffer::zeros(dtype, len + tail)
            }
        };
        buffer.resize(len);
        buffer
    }

    pub(crate) fn give(&self, buffer: Buffer) {
        self.lock().push(buffer);
    }

    pub(crate) fn clear(&self) {
        self.lock().clear();
    }

    // Nothing is half done behind this lock when its holder panics.
    fn lock(&self) -> MutexGuard<'_, Vec<Buffer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn weigh<T: Real>(values: &mut [T], gradient: &[T], samples: usize, onto: bool) -> Size {
    if samples == 0 {
        // The gradient of a stand-in may be NaN, and NaN x 0 is NaN.
        if !onto {
            values.fill(T::from_f64(0.0));
        }
        return Size::Modest;
    }
    let weight = T::from_f64(samples as f64);
    let pairs = values.iter_mut().zip(gradient);
    // An integer, since a float or a bool would keep the loop from being vectorised.
    let mut huge = 0u32;
    if onto {
        for (value, &gradient) in pairs {
            *value = *value + gradient * weight;
            huge |= u32::from(!value.is_modest());
        }
    } else {
        for (value, &gradient) in pairs {
            *value = gradient * weight;
            huge |= u32::from(!value.is_modest());
        }
    }
    if huge == 0 {
        Size::Modest
    } else if gradient.iter().all(|gradient| gradient.is_number()) {
        Size::Huge
    } else {
        Size::NoNumber
    }
}
