//! Where packed weights are: in memory, or in a file, of which the system caches as much as it has room for.

use crate::Linear;
use crate::memory::WeightFile;
use nq_formats::{Progress, human_bytes};
use nq_runtime::host::available_memory;
use nq_runtime::interface::LoadOptions;
use nq_runtime::{Error, Result};
use std::path::{Path, PathBuf};

/// Gives each layer's weights, as they are packed, a place in memory, or in a file if memory has no room for those that
/// follow. Experts go to the file first, as a token reads few of them but all of everything else.
pub struct WeightPlaces {
    /// Bytes of memory that are left for weights.
    room: usize,
    /// Bytes that must stay free beside them.
    beside: usize,
    folder: PathBuf,
    file: Option<WeightFile>,
    /// Bytes in the file.
    moved: usize,
    /// Layers with weights there.
    layers: usize,
}

impl WeightPlaces {
    /// In what memory is free, but for a sixteenth of it and for `taken` bytes, or in as much as `options` allow.
    pub fn new(options: &LoadOptions, taken: usize) -> Self {
        let free = free_memory();
        let room = free - free / 16;
        WeightPlaces {
            room: options
                .host_memory
                .map_or(room, |most| most.min(room))
                .saturating_sub(taken),
            beside: taken.saturating_add(free / 16),
            folder: temporary_folder(),
            file: None,
            moved: 0,
            layers: 0,
        }
    }

    /// Places the weights of a layer, the first of `left` that take about as much.
    ///
    /// # Errors
    /// [`nq_formats::Error::Io`], naming the folder: for a full disk, for instance.
    pub fn place(&mut self, mut weights: Vec<&mut Linear>, left: usize) -> Result<()> {
        let bytes = |weights: &[&mut Linear]| weights.iter().map(|w| w.bytes()).sum::<usize>();
        let lacks_room = |bytes: usize, room| bytes.saturating_mul(left) > room;
        let moved = self.moved;
        // What else has taken memory meanwhile leaves less; these weights are already there.
        let now = free_memory().saturating_sub(self.beside);
        self.room = self.room.min(now.saturating_add(bytes(&weights)));
        if lacks_room(bytes(&weights), self.room) {
            let (experts, others) = weights.into_iter().partition(|w| w.is_of_experts());
            self.move_to_file(experts)?;
            weights = others;
            if lacks_room(bytes(&weights), self.room) {
                self.move_to_file(std::mem::take(&mut weights))?;
            }
        }
        self.room = self.room.saturating_sub(bytes(&weights));
        self.layers += usize::from(self.moved > moved);
        Ok(())
    }

    fn move_to_file(&mut self, weights: Vec<&mut Linear>) -> Result<()> {
        let WeightPlaces { folder, file, .. } = self;
        let failed =
            |e| Error::Format(nq_formats::Error::io(&*folder, "keep weights in a file", e));
        for weight in weights {
            let file = match file {
                Some(file) => file,
                None => file.insert(WeightFile::new(folder).map_err(failed)?),
            };
            self.moved += weight.move_to(file).map_err(failed)?;
        }
        Ok(())
    }

    /// Says what lies in the file, if anything does.
    pub fn note(&self, progress: &dyn Progress) {
        if self.moved > 0 {
            progress.note(&format!(
                "memory has no room for {} of weights of {} layers: they are in an unnamed file in {}, and are read from there when \
                 they are needed",
                human_bytes(self.moved as u64),
                self.layers,
                self.folder.display()
            ));
        }
    }
}

/// Bytes that the system can hand out, or all if it does not say.
fn free_memory() -> usize {
    available_memory().map_or(usize::MAX, |bytes| bytes as usize)
}

/// `TMPDIR`, or where the system keeps large temporary files (`/var/tmp`: Filesystem Hierarchy Standard 3.0, 5.15), as `/tmp` is
/// memory on many systems.
fn temporary_folder() -> PathBuf {
    let large = Path::new("/var/tmp");
    match std::env::var_os("TMPDIR") {
        None if large.is_dir() => large.into(),
        _ => std::env::temp_dir(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cpu;
    use nq_formats::{Tensor, Weight};
    use nq_kernels::{Activations, IsaChoice, KernelSet};

    #[test]
    fn a_folder_that_takes_no_file_is_named() {
        let cpu = Cpu::new(Some(1), IsaChoice::Auto).unwrap();
        let weight = Weight::Dense(Tensor::from_f32(vec![16, 64], vec![1.0; 1024]).unwrap());
        let linear = Linear::new(&cpu, &[&weight], Activations::F32, KernelSet::Fused);
        let mut linear = linear.unwrap();
        let options = LoadOptions {
            host_memory: Some(0),
            ..LoadOptions::default()
        };
        let mut places = WeightPlaces::new(&options, 0);
        places.folder = "/no/such/folder".into();
        let error = places.place(vec![&mut linear], 1).unwrap_err().to_string();
        assert!(
            error.starts_with("/no/such/folder: keep weights in a file"),
            "{error}"
        );
    }
}
