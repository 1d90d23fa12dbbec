//! Made-up rows for models that are too wide for the embedded digits.

use super::{DataSet, Samples};
use crate::SplitMix64;

/// Ten classes of 784 features: a random centre for each class and uniform
/// noise of ±0.5 around it. 2,048 rows to train on, 256 to test; the same for
/// every run with the same seed. It measures the machinery, not the learning:
/// classes this far apart are easy.
///
/// ```
/// let data = examples::synthetic(7);
/// assert_eq!((data.train.width(), data.classes), (784, 10));
/// assert_eq!(data, examples::synthetic(7));
/// ```
pub fn synthetic(seed: u64) -> DataSet {
    const WIDTH: usize = 784;
    const CLASSES: usize = 10;
    let mut random = SplitMix64::new(seed);
    let centres: Vec<f64> = (0..CLASSES * WIDTH)
        .map(|_| random.uniform(0.0, 1.0))
        .collect();
    let mut part = |rows: usize| {
        let mut features = Vec::with_capacity(rows * WIDTH);
        let mut labels = Vec::with_capacity(rows);
        for row in 0..rows {
            let class = row % CLASSES;
            let centre = &centres[class * WIDTH..(class + 1) * WIDTH];
            features.extend(
                centre
                    .iter()
                    .map(|value| (value + random.uniform(-0.5, 0.5)) as f32),
            );
            labels.push(class as u8);
        }
        Samples::new(WIDTH, features, labels)
    };
    DataSet::new("synthetic".to_owned(), part(2048), part(256))
}
