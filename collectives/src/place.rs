//! Where a rank stands.

/// A rank and the size of its world.
///
/// ```
/// use collectives::Place;
/// let place = Place::new(0, 4);
/// assert_eq!((place.up(1), place.down(1)), (1, 3));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// This rank, from 0.
    pub rank: usize,
    /// How many ranks there are.
    pub world: usize,
}

impl Place {
    /// Rank `rank` of `world`.
    ///
    /// # Panics
    ///
    /// Panics if there is no such rank.
    pub fn new(rank: usize, world: usize) -> Self {
        assert!(rank < world, "rank {rank} of a world of {world}");
        Self { rank, world }
    }

    /// The rank `steps` places up the ring.
    pub fn up(self, steps: usize) -> usize {
        (self.rank + steps) % self.world
    }

    /// The rank `steps` places down the ring.
    pub fn down(self, steps: usize) -> usize {
        (self.rank + self.world - steps % self.world) % self.world
    }

    /// How many places this rank stands above `root`: rooted plans count from there.
    pub(crate) fn seat(self, root: usize) -> usize {
        self.down(root)
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.world)
    }
}
