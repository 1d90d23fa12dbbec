//! What people look at: tables, curves as CSV and as SVG.

mod curves;
mod memory;
mod step;
mod svg;
mod table;
mod timeline;

pub use curves::{Curve, curves_csv};
pub(crate) use memory::{Bar, memory_svg};
pub(crate) use step::step_svg;
pub use svg::curves_svg;
pub use table::{Columns, grouped};
pub use timeline::timeline;
