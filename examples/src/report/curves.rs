//! Curves as CSV: a column for the step, then one for each curve.

/// A named curve: one value a step, steps counted from 1.
#[derive(Debug, Clone, PartialEq)]
pub struct Curve {
    /// What the legend calls it.
    pub name: String,
    /// One value a step.
    pub values: Vec<f64>,
}

/// All curves in one table; a curve that ends early leaves its cells empty.
///
/// Numbers are written so that reading them back gives the same bits.
///
/// ```
/// use examples::{Curve, curves_csv};
///
/// let curve = Curve { name: "single".to_owned(), values: vec![2.5, 1.25] };
/// assert_eq!(curves_csv(&[curve]), "step,single\n1,2.5\n2,1.25\n");
/// ```
pub fn curves_csv(curves: &[Curve]) -> String {
    let steps = curves.iter().map(|curve| curve.values.len()).max();
    let mut text = String::from("step");
    for curve in curves {
        text.push(',');
        text.push_str(&curve.name);
    }
    for step in 0..steps.unwrap_or(0) {
        text.push_str(&format!("\n{}", step + 1));
        for curve in curves {
            text.push(',');
            if let Some(value) = curve.values.get(step) {
                text.push_str(&value.to_string());
            }
        }
    }
    text.push('\n');
    text
}
