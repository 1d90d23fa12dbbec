//! Handwritten digits: 1,797 embedded ones, or a folder in the format of MNIST.

use std::path::Path;

use super::{DataError, DataSet, IdxImages, Samples, idx_images, idx_labels};

/// Pixels of the embedded digits run from 0 to 16.
const DIGITS_SCALE: f64 = 16.0;

/// The embedded digits: 1,440 rows to train on, 357 to test, 64 features each
/// in 0 to 1 (pixel / 16), labels 0 to 9. See `data/PROVENANCE.md`.
///
/// ```
/// let digits = examples::digits();
/// assert_eq!((digits.train.len(), digits.test.len()), (1440, 357));
/// assert_eq!((digits.train.width(), digits.classes), (64, 10));
/// ```
pub fn digits() -> DataSet {
    macro_rules! embedded {
        ($name:literal) => {
            (
                $name.to_owned(),
                include_bytes!(concat!("../../data/digits/", $name)).to_vec(),
            )
        };
    }
    assemble(
        "digits (embedded)".to_owned(),
        embedded!("train-images-idx3-ubyte"),
        embedded!("train-labels-idx1-ubyte"),
        embedded!("t10k-images-idx3-ubyte"),
        embedded!("t10k-labels-idx1-ubyte"),
        DIGITS_SCALE,
    )
    .expect("the embedded digits are well formed")
}

/// Reads the four files of MNIST from `folder`, plain or gzipped; image size
/// and count come from the headers. Pixels are divided by `scale` (255 for
/// MNIST and its relatives).
///
/// # Errors
/// A file that is missing, unreadable or malformed, named; see [`DataError`].
pub fn mnist_folder(folder: &Path, scale: f64) -> Result<DataSet, DataError> {
    assemble(
        folder.display().to_string(),
        read(folder, "train-images-idx3-ubyte")?,
        read(folder, "train-labels-idx1-ubyte")?,
        read(folder, "t10k-images-idx3-ubyte")?,
        read(folder, "t10k-labels-idx1-ubyte")?,
        scale,
    )
}

/// A file's name for errors, and its bytes.
type File = (String, Vec<u8>);

fn read(folder: &Path, name: &'static str) -> Result<File, DataError> {
    // Some copies write the dimension with a dot: train-images.idx3-ubyte.
    let dotted = name.replacen("-idx", ".idx", 1);
    let path = [name, dotted.as_str()]
        .iter()
        .flat_map(|stem| [folder.join(stem), folder.join(format!("{stem}.gz"))])
        .find(|path| path.is_file())
        .ok_or_else(|| DataError::Missing {
            folder: folder.to_owned(),
            name,
        })?;
    let file = path.display().to_string();
    match std::fs::read(&path) {
        Ok(bytes) => Ok((file, bytes)),
        Err(error) => Err(DataError::Read {
            file,
            reason: error.to_string(),
        }),
    }
}

fn assemble(
    name: String,
    train_images: File,
    train_labels: File,
    test_images: File,
    test_labels: File,
    scale: f64,
) -> Result<DataSet, DataError> {
    let (images, train) = part(&train_images, &train_labels, scale)?;
    let (test_shape, test) = part(&test_images, &test_labels, scale)?;
    if test_shape != images {
        return Err(DataError::Shape {
            file: test_images.0,
            got: test_shape,
            expected: images,
        });
    }
    Ok(DataSet::new(name, train, test))
}

/// One part of the data and the shape of its images.
fn part(images: &File, labels: &File, scale: f64) -> Result<([usize; 2], Samples), DataError> {
    let parsed: IdxImages = idx_images(&images.0, &images.1)?;
    let values = idx_labels(&labels.0, &labels.1)?;
    if parsed.count != values.len() {
        return Err(DataError::Counts {
            images_file: images.0.clone(),
            images: parsed.count,
            labels_file: labels.0.clone(),
            labels: values.len(),
        });
    }
    if values.is_empty() || parsed.pixels.is_empty() {
        return Err(DataError::Empty {
            file: images.0.clone(),
        });
    }
    let samples = Samples::from_images(&images.0, &parsed, values, scale)?;
    Ok(([parsed.rows, parsed.columns], samples))
}
