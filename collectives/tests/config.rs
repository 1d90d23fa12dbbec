//! Settings: the forms they take, and those that cannot be.
use std::time::Duration;

use collectives::{
    Algorithm, Choice, Collective, Communicator, CommunicatorConfig, Error, Rule, transport::Local,
    tuning::Cost,
};

fn parse(text: &str) -> CommunicatorConfig {
    toml::from_str(text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn refused(text: &str) -> String {
    toml::from_str::<CommunicatorConfig>(text)
        .unwrap_err()
        .to_string()
}

#[test]
fn nothing_said_is_the_default() {
    let config = parse("");
    assert_eq!(config, CommunicatorConfig::new());
    assert_eq!(config.algorithm, Choice::Auto);
    assert_eq!((config.timeout_s, config.segment_kb), (60.0, 256));
    config.validate().unwrap();
}

#[test]
fn an_algorithm_is_a_name_or_a_list_of_rules() {
    assert_eq!(parse("algorithm = \"auto\"").algorithm, Choice::Auto);
    for &algorithm in Algorithm::ALL {
        let config = parse(&format!("algorithm = \"{algorithm}\""));
        assert_eq!(config, CommunicatorConfig::new().with_algorithm(algorithm));
    }
    let rules = "[{ up_to_kb = 48, algorithm = \"tree\" }, { algorithm = \"ring\" }]";
    let sized = Choice::Sized(vec![
        Rule {
            up_to_kb: Some(48),
            algorithm: Algorithm::Tree,
        },
        Rule {
            up_to_kb: None,
            algorithm: Algorithm::Ring,
        },
    ]);
    for collective in Collective::PLANNED {
        let config = parse(&format!(
            "{collective} = {rules}\ntimeout_s = 2\nsegment_kb = 64"
        ));
        let expected = CommunicatorConfig::new()
            .with_algorithm_for(collective, sized.clone())
            .with_timeout(Duration::from_secs(2))
            .with_segment_kb(64);
        assert_eq!(config, expected);
        config.validate().unwrap();
    }
}

#[test]
fn a_key_or_name_that_does_not_exist_is_an_error_that_lists_those_that_do() {
    let error = refused("algoritm = \"ring\"");
    assert!(
        error.contains("algoritm") && error.contains("segment_kb"),
        "{error}"
    );
    let error = refused("algorithm = \"rong\"");
    let names: Vec<_> = Algorithm::ALL.iter().map(|it| it.name()).collect();
    let listed = format!("{}, and auto", names.join(", "));
    assert!(error.contains("rong") && error.contains(&listed), "{error}");
    let error = refused("algorithm = [{ up_to_mb = 1, algorithm = \"ring\" }]");
    assert!(error.contains("up_to_mb"), "{error}");
    let error = refused("algorithm = 3");
    assert!(error.contains("a list of rules"), "{error}");
    refused("algorithm = [{ up_to_kb = 1 }]");
    refused("segment_kb = -1");
}

#[test]
fn settings_that_cannot_be_are_named_with_their_value() {
    for (text, key, value) in [
        ("timeout_s = 0", "timeout_s", "0"),
        ("timeout_s = -1.5", "timeout_s", "-1.5"),
        ("timeout_s = nan", "timeout_s", "NaN"),
        ("timeout_s = inf", "timeout_s", "inf"),
        ("segment_kb = 0", "segment_kb", "0"),
        ("segment_kb = 1048577", "segment_kb", "1048577"),
        ("direct_piece = 0", "direct_piece", "0"),
        ("algorithm = []", "algorithm", "[]"),
        ("reduce = []", "reduce", "[]"),
    ] {
        let error = parse(text).validate().unwrap_err();
        let (wrong, said) = match &error {
            Error::Config { key, value, .. } => (key, value),
            _ => panic!("{error}"),
        };
        assert_eq!((wrong.as_str(), said.as_str()), (key, value));
        assert_eq!(error.ranks(), [], "{error}");
    }
}

#[test]
fn rules_that_would_never_hold_are_refused() {
    let rule = |up_to_kb| Rule {
        up_to_kb,
        algorithm: Algorithm::Ring,
    };
    for (bounds, why) in [
        (&[] as &[_], "at least one rule"),
        (&[Some(4)], "the last rule must hold for any size"),
        (&[None, Some(4)], "the last rule must hold for any size"),
        (&[None, None], "only the last rule may be without"),
        (&[Some(8), Some(4), None], "ascending order"),
        (&[Some(4), Some(4), None], "ascending order"),
    ] {
        let rules = Choice::Sized(bounds.iter().copied().map(rule).collect());
        let config = CommunicatorConfig::new().with_algorithm_for(Collective::Broadcast, rules);
        let error = config.validate().unwrap_err().to_string();
        assert!(
            error.starts_with("broadcast = ") && error.contains(why),
            "{error}"
        );
    }
}

#[test]
fn a_communicator_is_not_made_from_what_cannot_be() {
    let alone = Local::mesh(1).remove(0);
    let config = CommunicatorConfig::new().with_segment_kb(0);
    assert!(matches!(
        Communicator::new(alone, &config),
        Err(Error::Config { .. })
    ));
}

#[test]
fn what_is_written_reads_back_the_same() {
    let sized = |bound| {
        Choice::Sized(vec![
            Rule {
                up_to_kb: Some(bound),
                algorithm: Algorithm::Naive,
            },
            Rule {
                up_to_kb: None,
                algorithm: Algorithm::Ring,
            },
        ])
    };
    let mut configs = vec![CommunicatorConfig::new()];
    configs.extend(
        Algorithm::ALL
            .iter()
            .map(|&it| CommunicatorConfig::new().with_algorithm(it)),
    );
    configs.push(
        Collective::PLANNED
            .into_iter()
            .enumerate()
            .fold(CommunicatorConfig::new(), |config, (index, collective)| {
                config.with_algorithm_for(collective, sized(index + 1))
            })
            .with_algorithm(sized(9))
            .with_timeout(Duration::from_millis(1234))
            .with_segment_kb(7)
            .with_deterministic(true)
            .with_direct_piece(4096)
            .with_tuning(vec![Cost {
                collective: Collective::ReduceScatter,
                ranks: 4,
                algorithm: Algorithm::Halving,
                alpha_us: 1.5,
                beta_us_per_kib: 0.25,
            }]),
    );
    for config in configs {
        let text = toml::to_string(&config).unwrap();
        assert_eq!(parse(&text), config, "{text}");
    }
}

#[test]
fn barriers_and_messages_have_no_algorithm_to_choose() {
    for collective in [Collective::Barrier, Collective::SendRecv] {
        let config = CommunicatorConfig::new().with_algorithm_for(collective, Algorithm::Ring);
        assert_eq!(config, CommunicatorConfig::new());
    }
}

#[test]
fn names_are_read_as_they_are_written() {
    for &algorithm in Algorithm::ALL {
        assert_eq!(algorithm.to_string().parse(), Ok(algorithm));
        assert_eq!(algorithm.name().parse(), Ok(Choice::Fixed(algorithm)));
    }
    assert_eq!("auto".parse(), Ok(Choice::Auto));
    assert!("Ring".parse::<Algorithm>().is_err());
}
