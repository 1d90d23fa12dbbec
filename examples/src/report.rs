//! What people look at: tables, curves as CSV and as SVG.

mod curves;
mod svg;
mod table;
mod timeline;

pub use curves::{Curve, curves_csv};
pub use svg::curves_svg;
pub use table::{Columns, grouped};
pub use timeline::timeline;
