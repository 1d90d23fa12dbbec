//! Mistakes that data-parallel programs are known for, made on purpose.

use zero::Stage;

use super::Mode;
use crate::{ConfigError, Settings};

/// A mistake to make in every data-parallel mode, so that the verdict can be
/// seen to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Gradients are summed and the division is forgotten: the learning rate
    /// is, in effect, too large by the world size. (With Adam this moves the
    /// losses by less than 1e-4: another reason to compare with SGD.)
    SumForMean,
    /// Nothing is reduced: every rank trains alone.
    NoAllReduce,
    /// Ranks count alike, however many rows they have. Needs batches that do
    /// not divide by the world size; see [`Fault::prepare`].
    PlainMean,
    /// The lowest bit of one weight is turned over after one step, on all ranks alike: no
    /// tolerance shows it, and equal bits do.
    OneBit,
    /// Every rank trains the whole global batch: the right losses, for N times
    /// the work. The losses cannot show it; the count of rows does.
    FullBatch,
}

impl Fault {
    /// The step in which [`Fault::OneBit`] strikes, from 0.
    pub(super) const ONE_BIT_STEP: usize = 4;

    /// Changes settings under which the fault would not show: a plain mean
    /// over even parts is the right mean, so that an even global batch loses
    /// half a row a rank (96 rows on 4 ranks become 94: 24, 24, 23, 23); and modes of stage 3 have no
    /// weights of which a bit could be turned over.
    ///
    /// # Errors
    /// [`ConfigError::Value`] in a world of one rank, where no fault shows, or if no mode is left.
    ///
    /// ```
    /// use examples::{Fault, Settings};
    ///
    /// let mut settings = Settings::compare();
    /// Fault::PlainMean.prepare(&mut settings)?;
    /// assert_eq!(settings.train.global_batch_size, 94);
    /// # Ok::<(), examples::ConfigError>(())
    /// ```
    pub fn prepare(self, settings: &mut Settings) -> Result<(), ConfigError> {
        let world = settings.run.world_size;
        if world < 2 {
            return Err(ConfigError::Value {
                key: "run.world_size".to_owned(),
                value: world.to_string(),
                allowed: "allowed is 2 or more with --inject: one rank alone shows no fault"
                    .to_owned(),
            });
        }
        if self == Self::OneBit {
            let modes = &mut settings.compare.modes;
            let asked = format!("{modes:?}");
            modes.retain(|name| {
                let mode = name.parse::<Mode>();
                mode.map_or(true, |mode| mode.stage() != Some(Stage::Three))
            });
            if modes.is_empty() {
                let allowed = "another mode with this --inject: at stage 3 no rank has the weight";
                return Err(ConfigError::Value {
                    key: "compare.modes".to_owned(),
                    value: asked,
                    allowed: format!("allowed is {allowed}"),
                });
            }
        }
        let batch = &mut settings.train.global_batch_size;
        if self == Self::PlainMean && *batch <= world {
            return Err(ConfigError::Value {
                key: "train.global_batch_size".to_owned(),
                value: batch.to_string(),
                allowed: format!(
                    "allowed is {} or more with this --inject: with a row a rank the plain mean is \
                     right",
                    world + 1
                ),
            });
        }
        if self == Self::PlainMean && batch.is_multiple_of(world) {
            *batch -= world.div_ceil(2);
        }
        Ok(())
    }
}
