//! Layers that cannot give the same bits at every world size.
use burn::module::{Flag, Module, ModuleVisitor, Param};

use crate::{Error, Result};

const RANDOM: &str = "it behaves otherwise while it is trained: Burn's layers of this kind draw from a random state that \
     all ranks of a process share, so that it depends on who draws first. Leave it out, or freeze \
     it (`freeze()`)";
const STATISTICS: &str = "it normalises by the rows that one forward pass happens to see, and its running state depends on \
     which rank saw them. LayerNorm, GroupNorm and RmsNorm can keep it; so can this layer \
     frozen (`freeze()`)";

/// Refuses modules with such layers, by name.
pub(crate) fn refuse_inexact<M: Module>(module: &M) -> Result<()> {
    let mut visitor = Inexact {
        path: Vec::new(),
        containers: Vec::new(),
        found: None,
    };
    module.visit(&mut visitor);
    match visitor.found {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

struct Inexact {
    path: Vec<String>,
    containers: Vec<String>,
    found: Option<Error>,
}

impl Inexact {
    /// The type that holds what is being visited, and where that lies.
    fn note(&mut self, why: &'static str) {
        let layer = self.containers.last().cloned().unwrap_or_default();
        let holder = &self.path[..self.path.len().saturating_sub(1)];
        let path = match holder {
            [] => "the top of the module".to_owned(),
            names => names.join("."),
        };
        self.found
            .get_or_insert(Error::NotExact { layer, path, why });
    }
}

impl ModuleVisitor for Inexact {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.push(name.to_owned());
        let layer = container
            .split_once(':')
            .map_or(container, |(_, name)| name);
        self.containers.push(layer.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
        self.containers.pop();
    }

    /// By such a flag a layer knows that it is being trained; frozen ones are harmless.
    fn visit_flag(&mut self, flag: &Param<Flag>) {
        if !flag.is_enabled() {
            return;
        }
        match self.containers.last().map(String::as_str) {
            Some("BatchNorm") => self.note(STATISTICS),
            // Dropout, GaussianNoise, RRelu, and whatever comes or is the user's own.
            _ => self.note(RANDOM),
        }
    }
}
