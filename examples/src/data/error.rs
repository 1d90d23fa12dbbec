//! What can be wrong with a file of data, said so that it can be mended.

use std::path::PathBuf;

/// A file that cannot be used, where it is wrong, and what was expected.
///
/// Rows count from 0, as in the arrays they become; lines and columns of a
/// text file count from 1, as in an editor.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum DataError {
    /// The file could not be read at all.
    #[error("{file}: cannot be read: {reason}")]
    Read {
        /// The file.
        file: String,
        /// The operating system's or the unpacker's words.
        reason: String,
    },
    /// A folder lacks one of the four files of MNIST.
    #[error("{}: no file {name}, neither plain nor with .gz", folder.display())]
    Missing {
        /// The folder searched.
        folder: PathBuf,
        /// The name looked for.
        name: &'static str,
    },
    /// The first four bytes are not those of the expected kind of IDX file.
    #[error(
        "{file}: starts with 0x{got:08x}, expected 0x{expected:08x} (IDX {kind}, unsigned bytes)"
    )]
    Magic {
        /// The file.
        file: String,
        /// "images" or "labels".
        kind: &'static str,
        /// The magic number of that kind.
        expected: u32,
        /// What the file starts with.
        got: u32,
    },
    /// The file has more or fewer bytes than its header announces.
    #[error("{file}: {got} bytes, expected {expected} ({because})")]
    Length {
        /// The file.
        file: String,
        /// Bytes that are there, after unpacking.
        got: u64,
        /// Bytes that should be.
        expected: u64,
        /// How the expectation comes about.
        because: String,
    },
    /// Images and labels do not pair up.
    #[error(
        "{images_file} has {images} images but {labels_file} has {labels} labels; expected equal counts"
    )]
    Counts {
        /// The file of images.
        images_file: String,
        /// Its count.
        images: usize,
        /// The file of labels.
        labels_file: String,
        /// Its count.
        labels: usize,
    },
    /// Training and test images have different shapes.
    #[error("{file}: images of {got:?} pixels, expected {expected:?} as in the training images")]
    Shape {
        /// The file of test images.
        file: String,
        /// Its rows and columns.
        got: [usize; 2],
        /// The training images' rows and columns.
        expected: [usize; 2],
    },
    /// A pixel is larger than the scale it is to be divided by.
    #[error(
        "{file}: image {image} has a pixel of {pixel}, above the pixel scale {scale}; set data.pixel_scale (--pixel-scale) to the largest pixel value, usually 255"
    )]
    Pixel {
        /// The file of images.
        file: String,
        /// Which image, from 0.
        image: usize,
        /// The pixel's value.
        pixel: u8,
        /// The scale in force.
        scale: f64,
    },
    /// A field of a CSV file is not a number.
    #[error("{file}: line {line}, column {column}: \"{text}\" is not a number")]
    NotANumber {
        /// The file.
        file: String,
        /// Line, from 1.
        line: usize,
        /// Column (field), from 1.
        column: usize,
        /// The field.
        text: String,
    },
    /// A field of a CSV file is NaN or infinite.
    #[error(
        "{file}: row {row} (line {line}), column {column}: {value} is not finite; remove the row or mend it"
    )]
    NotFinite {
        /// The file.
        file: String,
        /// Row, from 0.
        row: usize,
        /// Line, from 1.
        line: usize,
        /// Column (field), from 1.
        column: usize,
        /// The value: NaN or an infinity.
        value: String,
    },
    /// A row of a CSV file is shorter or longer than the first one.
    #[error(
        "{file}: row {row} (line {line}) has {got} columns, expected {expected} as in the first row"
    )]
    Ragged {
        /// The file.
        file: String,
        /// Row, from 0.
        row: usize,
        /// Line, from 1.
        line: usize,
        /// Columns in this row.
        got: usize,
        /// Columns in the first row.
        expected: usize,
    },
    /// The file holds no row.
    #[error("{file}: no rows; expected at least one")]
    Empty {
        /// The file.
        file: String,
    },
}
