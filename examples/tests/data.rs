//! Files of data: what is read, and what is refused in which words.

use std::io::Write;
use std::path::PathBuf;

use examples::{
    DataError, Error, Settings, Task, digits, idx_images, idx_labels, iris, mnist_folder, read_csv,
};

/// A folder of its own for one test.
pub(crate) fn folder(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    drop(std::fs::remove_dir_all(&path));
    std::fs::create_dir_all(&path).unwrap();
    path
}

fn images(dimensions: [u32; 3], pixels: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0, 0, 8, 3];
    bytes.extend(dimensions.iter().flat_map(|length| length.to_be_bytes()));
    bytes.extend(pixels);
    bytes
}

fn labels(values: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0, 0, 8, 1];
    bytes.extend((values.len() as u32).to_be_bytes());
    bytes.extend(values);
    bytes
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    packer.write_all(bytes).unwrap();
    packer.finish().unwrap()
}

#[test]
fn the_embedded_data_have_the_totals_of_their_provenance() {
    let iris = iris();
    let total = |column| iris.iter().map(|row| row[column]).sum::<f64>();
    for (column, expected) in [876.5, 458.1, 563.8, 179.8].into_iter().enumerate() {
        assert!((total(column) - expected).abs() < 1e-9, "column {column}");
    }
    let digits = digits();
    let count = |labels: &[u8], class| labels.iter().filter(|&&label| label == class).count();
    let classes = [137, 142, 145, 146, 156, 141, 146, 138, 136, 153];
    for (class, expected) in (0..).zip(classes) {
        assert_eq!(count(digits.train.labels(), class), expected);
    }
    assert_eq!(digits.train.row(0).iter().copied().fold(0.0, f32::max), 1.0);
}

#[test]
fn a_folder_is_read_plain_or_gzipped_with_the_size_from_its_headers() {
    let folder = folder("idx-mixed");
    let train = images([3, 1, 2], &[0, 255, 51, 0, 0, 0]);
    std::fs::write(folder.join("train-images-idx3-ubyte.gz"), gzip(&train)).unwrap();
    std::fs::write(folder.join("train-labels-idx1-ubyte"), labels(&[0, 1, 2])).unwrap();
    // Gzipped without the name that says so: content decides.
    let test = gzip(&images([1, 1, 2], &[255, 255]));
    std::fs::write(folder.join("t10k-images-idx3-ubyte"), test).unwrap();
    std::fs::write(
        folder.join("t10k-labels-idx1-ubyte.gz"),
        gzip(&labels(&[2])),
    )
    .unwrap();
    let data = mnist_folder(&folder, 255.0).unwrap();
    assert_eq!((data.train.len(), data.test.len()), (3, 1));
    assert_eq!((data.train.width(), data.classes), (2, 3));
    assert_eq!(data.train.row(0), [0.0, 1.0]);
    assert_eq!(data.train.row(1), [0.2, 0.0]);
}

#[test]
fn a_missing_file_is_named() {
    let folder = folder("idx-missing");
    let error = mnist_folder(&folder, 255.0).unwrap_err();
    let name = "train-images-idx3-ubyte";
    assert!(matches!(error, DataError::Missing { name: missing, .. } if missing == name));
}

#[test]
fn a_wrong_magic_is_told_with_the_right_one() {
    let error = idx_images("some-file", &labels(&[1, 2])).unwrap_err();
    let text = error.to_string();
    assert_eq!(
        text,
        "some-file: starts with 0x00000801, expected 0x00000803 (IDX images, unsigned bytes)"
    );
    assert!(matches!(
        idx_labels("some-file", &images([1, 1, 1], &[0])).unwrap_err(),
        DataError::Magic {
            expected: 0x801,
            got: 0x803,
            ..
        }
    ));
}

#[test]
fn a_short_and_a_long_file_are_told_with_both_lengths() {
    let error = idx_images("short", &images([2, 2, 2], &[0; 7])).unwrap_err();
    assert_eq!(
        error.to_string(),
        "short: 23 bytes, expected 24 (its header says 2 x 2 x 2 after 16 bytes)"
    );
    let error = idx_images("long", &images([2, 2, 2], &[0; 9])).unwrap_err();
    assert!(matches!(
        error,
        DataError::Length {
            got: 25,
            expected: 24,
            ..
        }
    ));
    let error = idx_labels("header", &[0, 0, 8, 1, 0]).unwrap_err();
    assert!(matches!(
        error,
        DataError::Length {
            got: 5,
            expected: 8,
            ..
        }
    ));
    // Nothing is allocated for what a header merely announces.
    let error = idx_images("huge", &images([u32::MAX; 3], &[])).unwrap_err();
    assert!(matches!(
        error,
        DataError::Length {
            expected: u64::MAX,
            ..
        }
    ));
    assert!(matches!(
        idx_images("empty", &[]),
        Err(DataError::Length { got: 0, .. })
    ));
}

#[test]
fn a_broken_gzip_is_an_error_with_the_file_s_name() {
    let mut bytes = gzip(&labels(&[1, 2, 3]));
    bytes.truncate(bytes.len() / 2);
    let error = idx_labels("half.gz", &bytes).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("half.gz: cannot be read: gzip"),
        "{error}"
    );
}

#[test]
fn unequal_counts_and_pixels_above_the_scale_are_refused() {
    let folder = folder("idx-unequal");
    let write = |name: &str, bytes: Vec<u8>| std::fs::write(folder.join(name), bytes).unwrap();
    write("train-images-idx3-ubyte", images([2, 1, 1], &[3, 17]));
    write("train-labels-idx1-ubyte", labels(&[0, 1, 1]));
    write("t10k-images-idx3-ubyte", images([1, 1, 1], &[0]));
    write("t10k-labels-idx1-ubyte", labels(&[0]));
    let error = mnist_folder(&folder, 255.0).unwrap_err();
    assert!(
        matches!(
            error,
            DataError::Counts {
                images: 2,
                labels: 3,
                ..
            }
        ),
        "{error}"
    );
    write("train-labels-idx1-ubyte", labels(&[0, 1]));
    let error = mnist_folder(&folder, 16.0).unwrap_err();
    assert!(
        matches!(
            error,
            DataError::Pixel {
                image: 1,
                pixel: 17,
                ..
            }
        ),
        "{error}"
    );
    assert!(mnist_folder(&folder, 17.0).is_ok());
    write("t10k-images-idx3-ubyte", images([1, 1, 2], &[0, 0]));
    let error = mnist_folder(&folder, 255.0).unwrap_err();
    assert!(
        matches!(
            error,
            DataError::Shape {
                got: [1, 2],
                expected: [1, 1],
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn layers_must_fit_the_data() {
    let mut settings = Settings::train();
    settings.model.layers = vec![784, 128, 10];
    let error = Task::new(settings).unwrap_err();
    assert!(matches!(error, Error::Config(_)));
    assert!(
        error.to_string().contains("64 must come first and 10 last"),
        "{error}"
    );
}

#[test]
fn a_csv_error_has_its_line_and_column() {
    let folder = folder("csv");
    let read = |text: &str| {
        let path = folder.join("rows.csv");
        std::fs::write(&path, text).unwrap();
        read_csv(&path)
    };
    let matrix = read("1, 2.5\n\n-3e2,4\r\n").unwrap();
    assert_eq!(
        (matrix.rows(), matrix.values()),
        (2, [1.0, 2.5, -300.0, 4.0].as_slice())
    );
    assert!(matches!(
        read("1,2\n3,x\n").unwrap_err(),
        DataError::NotANumber {
            line: 2,
            column: 2,
            ..
        }
    ));
    assert!(matches!(
        read("1,2\n3,4\n5\n").unwrap_err(),
        DataError::Ragged {
            row: 2,
            line: 3,
            got: 1,
            expected: 2,
            ..
        }
    ));
    for value in ["NaN", "inf", "-inf", "1e999"] {
        let error = read(&format!("0\n1\n10\n11\n{value}\n")).unwrap_err();
        assert!(
            matches!(
                error,
                DataError::NotFinite {
                    row: 4,
                    line: 5,
                    column: 1,
                    ..
                }
            ),
            "{error}"
        );
    }
    assert!(matches!(read("\n\n").unwrap_err(), DataError::Empty { .. }));
    assert!(matches!(
        read_csv(&folder.join("none.csv")).unwrap_err(),
        DataError::Read { .. }
    ));
}

#[test]
fn a_byte_order_mark_before_a_csv_is_passed_over() {
    let path = folder("csv-mark").join("rows.csv");
    std::fs::write(&path, "\u{feff}1,2\r\n3,4\r\n").unwrap();
    assert_eq!(read_csv(&path).unwrap().values(), [1.0, 2.0, 3.0, 4.0]);
}
