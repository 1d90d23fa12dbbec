//! Iris, in the variant behind the AllReduce article (UCI's).

use super::Matrix;

/// The 150 rows of the embedded Iris, four measurements each, without species.
/// See `data/PROVENANCE.md`.
///
/// ```
/// let iris = examples::iris();
/// assert_eq!((iris.rows(), iris.columns()), (150, 4));
/// assert_eq!(iris.row(0), [5.1, 3.5, 1.4, 0.2]);
/// ```
pub fn iris() -> Matrix {
    parse_iris(include_str!("../../data/iris.csv"))
}

/// The three rows from which the first iteration gives the article's buffer:
/// rows 146, 1 and 90, counted from 1.
///
/// ```
/// assert_eq!(examples::article_start().row(0), [6.7, 3.0, 5.2, 2.3]);
/// ```
pub fn article_start() -> Matrix {
    let iris = iris();
    let values = [146, 1, 90]
        .iter()
        .flat_map(|number| iris.row(number - 1).to_vec())
        .collect();
    Matrix::new(iris.columns(), values)
}

/// Takes the four measurements out of a file that has the embedded one's
/// layout: a header, four numbers, the species.
///
/// # Panics
/// If `text` has another layout; it is meant for files that come with us.
pub fn parse_iris(text: &str) -> Matrix {
    let values = text
        .lines()
        .skip(1)
        .flat_map(|line| line.split(',').take(4))
        .map(|field| field.parse().expect("a measurement"))
        .collect();
    Matrix::new(4, values)
}
