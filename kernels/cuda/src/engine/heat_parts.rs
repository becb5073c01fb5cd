//! What is kept of the heat of experts of a model over several GPUs, each of which has some of the layers.

use nq_runtime::interface::HeatKeeper;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// Keeps the heat of all ranks once none of them computes any more.
struct AllHeat {
    keeper: Box<dyn HeatKeeper>,
    experts: usize,
    /// What ranks gave to keep; zeros of those that gave nothing.
    heat: Mutex<Option<Vec<f32>>>,
}

impl Drop for AllHeat {
    fn drop(&mut self) {
        let heat = self.heat.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(heat) = heat {
            self.keeper.keep(heat);
        }
    }
}

/// Keeps the heat of a rank.
pub(super) struct HeatPart {
    all: Arc<AllHeat>,
    experts: Range<usize>,
}

impl HeatPart {
    /// A keeper for each rank, by its number of experts, of what `keeper` keeps of all.
    pub(super) fn of_all(
        keeper: Box<dyn HeatKeeper>,
        ranks: impl Iterator<Item = usize>,
    ) -> Vec<HeatPart> {
        let mut end = 0;
        let ranges = ranks.map(|experts| {
            end += experts;
            end - experts..end
        });
        let ranges: Vec<Range<usize>> = ranges.collect();
        let all = Arc::new(AllHeat {
            keeper,
            experts: end,
            heat: Mutex::new(None),
        });
        let part = |experts| HeatPart {
            all: Arc::clone(&all),
            experts,
        };
        ranges.into_iter().map(part).collect()
    }
}

impl HeatKeeper for HeatPart {
    fn kept(&self, experts: usize) -> Option<Vec<f32>> {
        let all = self.all.keeper.kept(self.all.experts)?;
        let part = all.get(self.experts.clone())?;
        (part.len() == experts).then(|| part.to_vec())
    }

    fn keep(&self, heat: &[f32]) {
        let mut all = (self.all.heat.lock()).unwrap_or_else(PoisonError::into_inner);
        let all = all.get_or_insert_with(|| vec![0.0; self.all.experts]);
        let part = all.get_mut(self.experts.clone());
        if let Some(part) = part.filter(|part| part.len() == heat.len()) {
            part.copy_from_slice(heat);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Shared(Arc<Mutex<Vec<f32>>>);

    impl HeatKeeper for Shared {
        fn kept(&self, experts: usize) -> Option<Vec<f32>> {
            let heat = self.0.lock().unwrap();
            (heat.len() == experts).then(|| heat.clone())
        }

        fn keep(&self, heat: &[f32]) {
            *self.0.lock().unwrap() = heat.to_vec();
        }
    }

    #[test]
    fn ranks_keep_their_layers_in_what_is_kept_of_all() {
        let file = Arc::new(Mutex::new(Vec::new()));
        let parts = || HeatPart::of_all(Box::new(Shared(file.clone())), [2, 3, 1].into_iter());
        let first = parts();
        assert!(first.iter().all(|part| part.kept(2).is_none()));
        first[2].keep(&[6.0]);
        first[0].keep(&[1.0, 2.0]);
        assert!(file.lock().unwrap().is_empty(), "a rank may still compute");
        drop(first);
        // The second rank had nothing to keep.
        assert_eq!(*file.lock().unwrap(), [1.0, 2.0, 0.0, 0.0, 0.0, 6.0]);
        let later = parts();
        assert_eq!(later[0].kept(2).unwrap(), [1.0, 2.0]);
        assert_eq!(later[1].kept(3).unwrap(), [0.0; 3]);
        assert_eq!(later[1].kept(2), None);
        drop(later);
        assert_eq!(file.lock().unwrap().len(), 6);
    }
}
