//! Curves as files.

use examples::{Curve, curves_csv, curves_svg};

fn curve(name: &str, values: &[f64]) -> Curve {
    Curve {
        name: name.to_owned(),
        values: values.to_vec(),
    }
}

#[test]
fn a_csv_number_reads_back_to_the_same_bits() {
    let values = [0.1 + 0.2, 1e-300, -2.0 / 3.0];
    let text = curves_csv(&[curve("a", &values), curve("b", &[1.0])]);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "step,a,b");
    assert_eq!(lines[1].split(',').next_back(), Some("1"));
    assert!(
        lines[2].ends_with(','),
        "a curve that ended leaves its cell empty"
    );
    for (line, value) in lines[1..].iter().zip(values) {
        let cell: f64 = line.split(',').nth(1).unwrap().parse().unwrap();
        assert_eq!(cell.to_bits(), value.to_bits());
    }
}

#[test]
fn a_drawing_has_a_line_and_a_legend_for_each_curve_and_gaps_for_no_numbers() {
    let curves = [
        curve("one", &[2.0, f64::NAN, 1.0, 0.5]),
        curve("two", &[1.0; 4]),
    ];
    let svg = curves_svg("Loss", "step", "loss", &curves);
    // Two pieces around the gap, one whole curve, two samples in the legend.
    assert_eq!(svg.matches("<polyline").count(), 5);
    assert!(svg.contains(">one</text>") && svg.contains(">two</text>"));
    assert!(!svg.contains("NaN") && !svg.contains("inf"));
}

#[test]
fn drawings_of_nothing_and_of_one_value_are_drawings() {
    for curves in [
        vec![],
        vec![curve("flat", &[0.0])],
        vec![curve("none", &[f64::INFINITY])],
    ] {
        let svg = curves_svg("Loss", "step", "loss", &curves);
        assert!(svg.ends_with("</svg>\n") && !svg.contains("NaN"));
    }
}
