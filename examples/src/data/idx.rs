//! IDX, the format of MNIST: a big-endian header, then unsigned bytes.

use std::io::Read;

use super::DataError;

/// First four bytes of a file of images: unsigned bytes, three dimensions.
const IMAGES: u32 = 0x0000_0803;
/// First four bytes of a file of labels: unsigned bytes, one dimension.
const LABELS: u32 = 0x0000_0801;

/// Images as they lie in the file: one byte a pixel, row by row.
#[derive(Debug, Clone, PartialEq)]
pub struct IdxImages {
    /// How many images.
    pub count: usize,
    /// Pixel rows of one image.
    pub rows: usize,
    /// Pixel columns of one image.
    pub columns: usize,
    /// `count * rows * columns` pixels.
    pub pixels: Vec<u8>,
}

/// Reads a file of images from its bytes, plain or gzipped (told by content).
///
/// `file` is the name that errors carry.
///
/// # Errors
/// [`DataError::Magic`], [`DataError::Length`], or [`DataError::Read`] if the
/// bytes look gzipped and cannot be unpacked.
///
/// ```
/// let bytes = [0, 0, 8, 3, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 2, 7, 9];
/// let images = examples::idx_images("two-pixels", &bytes)?;
/// assert_eq!((images.count, images.rows, images.columns), (1, 1, 2));
/// assert_eq!(images.pixels, [7, 9]);
/// # Ok::<(), examples::DataError>(())
/// ```
pub fn idx_images(file: &str, bytes: &[u8]) -> Result<IdxImages, DataError> {
    let (dimensions, pixels) = parse::<3>(file, bytes, IMAGES, "images")?;
    let [count, rows, columns] = dimensions;
    Ok(IdxImages {
        count,
        rows,
        columns,
        pixels,
    })
}

/// Reads a file of labels from its bytes, plain or gzipped (told by content).
///
/// # Errors
/// As [`idx_images`].
///
/// ```
/// let labels = examples::idx_labels("two", &[0, 0, 8, 1, 0, 0, 0, 2, 4, 5])?;
/// assert_eq!(labels, [4, 5]);
/// # Ok::<(), examples::DataError>(())
/// ```
pub fn idx_labels(file: &str, bytes: &[u8]) -> Result<Vec<u8>, DataError> {
    let (_, labels) = parse::<1>(file, bytes, LABELS, "labels")?;
    Ok(labels)
}

/// The dimensions and the bytes behind the header.
fn parse<const D: usize>(
    file: &str,
    bytes: &[u8],
    expected: u32,
    kind: &'static str,
) -> Result<([usize; D], Vec<u8>), DataError> {
    let bytes = unpack(file, bytes)?;
    let header = 4 + 4 * D;
    let word = |at: usize| {
        let four: [u8; 4] = bytes[at..at + 4].try_into().expect("four bytes");
        u32::from_be_bytes(four)
    };
    // The magic comes first: a file of the wrong kind is better told so than
    // that it is short.
    if bytes.len() >= 4 && word(0) != expected {
        return Err(DataError::Magic {
            file: file.to_owned(),
            kind,
            expected,
            got: word(0),
        });
    }
    let wrong_length = |expected: u64, because: String| DataError::Length {
        file: file.to_owned(),
        got: bytes.len() as u64,
        expected,
        because,
    };
    if bytes.len() < header {
        let because = format!("the header of IDX {kind} alone");
        return Err(wrong_length(header as u64, because));
    }
    let dimensions: [usize; D] = std::array::from_fn(|axis| word(4 + 4 * axis) as usize);
    // Three 32-bit factors need 96 bits; no file is that long.
    let announced: u128 = dimensions.iter().map(|&length| length as u128).product();
    let expected = u64::try_from(announced + header as u128).unwrap_or(u64::MAX);
    if bytes.len() as u64 != expected {
        let sizes = dimensions.map(|length| length.to_string()).join(" x ");
        let because = format!("its header says {sizes} after {header} bytes");
        return Err(wrong_length(expected, because));
    }
    Ok((dimensions, bytes[header..].to_vec()))
}

/// The bytes themselves, or what they unpack to if they start like gzip.
fn unpack<'a>(file: &str, bytes: &'a [u8]) -> Result<std::borrow::Cow<'a, [u8]>, DataError> {
    if !bytes.starts_with(&[0x1f, 0x8b]) {
        return Ok(bytes.into());
    }
    let mut unpacked = Vec::new();
    flate2::read::MultiGzDecoder::new(bytes)
        .read_to_end(&mut unpacked)
        .map_err(|error| DataError::Read {
            file: file.to_owned(),
            reason: format!("gzip: {error}"),
        })?;
    Ok(unpacked.into())
}
