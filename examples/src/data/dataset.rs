//! What a classifier trains on: rows of numbers and a label for each.

use super::{DataError, IdxImages};

/// Labelled rows, features in row order.
#[derive(Debug, Clone, PartialEq)]
pub struct Samples {
    width: usize,
    features: Vec<f32>,
    labels: Vec<u8>,
}

impl Samples {
    /// Joins `labels.len()` rows of `width` features with their labels.
    ///
    /// # Panics
    /// If the lengths do not fit, which is a caller's mistake.
    ///
    /// ```
    /// let samples = examples::Samples::new(2, vec![0.0, 0.5, 1.0, 0.0], vec![3, 1]);
    /// assert_eq!(samples.len(), 2);
    /// assert_eq!(samples.row(1), [1.0, 0.0]);
    /// ```
    pub fn new(width: usize, features: Vec<f32>, labels: Vec<u8>) -> Self {
        assert_eq!(
            features.len(),
            width * labels.len(),
            "features of {} rows of {width}",
            labels.len()
        );
        Self {
            width,
            features,
            labels,
        }
    }

    /// Divides each pixel by `scale`, so that features lie in 0 to 1.
    pub(super) fn from_images(
        file: &str,
        images: &IdxImages,
        labels: Vec<u8>,
        scale: f64,
    ) -> Result<Self, DataError> {
        let width = images.rows * images.columns;
        if let Some(at) = images
            .pixels
            .iter()
            .position(|&pixel| f64::from(pixel) > scale)
        {
            return Err(DataError::Pixel {
                file: file.to_owned(),
                image: at / width,
                pixel: images.pixels[at],
                scale,
            });
        }
        let features = images
            .pixels
            .iter()
            .map(|&pixel| f32::from(pixel) / scale as f32)
            .collect();
        Ok(Self::new(width, features, labels))
    }

    /// How many rows.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// Features of one row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The features of one row.
    pub fn row(&self, row: usize) -> &[f32] {
        &self.features[row * self.width..(row + 1) * self.width]
    }

    /// The label of each row.
    pub fn labels(&self) -> &[u8] {
        &self.labels
    }
}

/// A training part and a test part with the same columns.
#[derive(Debug, Clone, PartialEq)]
pub struct DataSet {
    /// What to call it in reports.
    pub name: String,
    /// Rows to learn from.
    pub train: Samples,
    /// Rows to judge by.
    pub test: Samples,
    /// Labels are `0..classes`.
    pub classes: usize,
}

impl DataSet {
    /// Joins the parts; the number of classes is the largest label plus one.
    pub(super) fn new(name: String, train: Samples, test: Samples) -> Self {
        let largest = train.labels().iter().chain(test.labels()).max();
        Self {
            name,
            classes: largest.map_or(0, |&label| usize::from(label) + 1),
            train,
            test,
        }
    }
}
