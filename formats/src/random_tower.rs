//! A random tower beside the weights of a model, for measuring speed before a download.

use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::scheme::Scheme;
use crate::store::{Overlay, WeightStore};
use crate::synth::random_tensor;
use crate::tensor::Tensor;
use crate::weight::Weight;
use nq_model::vision::{TOWER, VisionConfig};
use nq_model::{Architecture, Dims};

impl Checkpoint {
    /// The same with a tower of this shape, whose bf16 weights are drawn with a seed when they are asked for.
    pub fn with_random_tower(self, vision: VisionConfig, seed: u64) -> Checkpoint {
        let architecture = self.config().architecture;
        let over = |inner| {
            Box::new(RandomTower {
                inner,
                architecture,
                seed,
            }) as Box<dyn WeightStore>
        };
        self.over(over).seeing(Some(vision))
    }
}

/// A store that has a tower's parameters too.
struct RandomTower {
    inner: Box<dyn WeightStore>,
    architecture: &'static Architecture,
    seed: u64,
}

impl RandomTower {
    fn drawn(&self, name: &str, shape: Vec<usize>) -> Tensor {
        random_tensor(self.architecture, self.seed, name, shape)
    }
}

impl Overlay for RandomTower {
    fn inner(&self) -> &dyn WeightStore {
        self.inner.as_ref()
    }

    fn scheme_in_levels(&self, name: &str) -> Option<Scheme> {
        self.inner.scheme_in_levels(name)
    }

    fn contains(&self, name: &str) -> bool {
        name.starts_with(TOWER) || self.inner.contains(name)
    }

    fn vector(&self, name: &str, len: usize) -> Result<Tensor> {
        match name.starts_with(TOWER) {
            true => Ok(self.drawn(name, vec![len])),
            false => self.inner.vector(name, len),
        }
    }

    fn matrix(&self, name: &str, dims: Dims) -> Result<Weight> {
        match name.starts_with(TOWER) {
            true => Ok(Weight::Dense(self.drawn(name, vec![dims.rows, dims.cols]))),
            false => self.inner.matrix(name, dims),
        }
    }
}
