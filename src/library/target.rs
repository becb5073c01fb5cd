//! What was quantized, in the format in which another engine loads it.
//!
//! The work is done in nq's own folder beside the destination, which can be resumed; once that is
//! complete, it is written in the other format, whole or not at all, and then removed.

use super::Result;
use crate::written;
use nq_formats::durable::{Unchecked, check_destination};
use nq_formats::export::{ExportFormat, ExportOptions, ExportReport, export};
use nq_formats::{Bits, Checkpoint, Progress, human_bytes};
use nq_model::Dims;
use nq_model::names::{Shape, is_kept, is_layer_linear, parameters};
use nq_quantize::schemes::head_scheme;
use nq_quantize::{QuantizeReport, Schemes};
use std::path::{Path, PathBuf};

/// Destination and format of the result.
pub(crate) struct QuantizeTarget {
    pub(crate) format: ExportFormat,
    pub(crate) out: PathBuf,
    pub(crate) force: bool,
}

impl QuantizeTarget {
    /// The folder of the quantized model: the destination, or one beside it.
    pub(crate) fn folder(&self) -> PathBuf {
        match self.format {
            ExportFormat::Nq => self.out.clone(),
            _ => {
                let mut name = self.out.clone().into_os_string();
                name.push(".nq");
                name.into()
            }
        }
    }

    /// Refuses what could not be written in the end, and reports what the format costs.
    ///
    /// # Errors
    /// A destination that is taken or lies in the source; schemes that the format cannot hold.
    pub(crate) fn check(
        &self,
        checkpoint: &Checkpoint,
        schemes: &Schemes,
    ) -> Result<Option<String>> {
        if self.format == ExportFormat::Nq {
            return Ok(None);
        }
        let format = self.format;
        check_destination(&self.out, format.form(), self.force)?;
        checkpoint.files().check_apart(&self.out)?;
        let all = parameters(checkpoint.config());
        let matrices = all.iter().filter_map(|(name, shape)| match *shape {
            Shape::Matrix(rows, cols) if !is_kept(name) => {
                Some((name.as_str(), Dims { rows, cols }))
            }
            _ => None,
        });
        let (linears, ends): (Vec<_>, Vec<_>) = matrices.partition(|(name, _)| {
            // In a GGUF file, embedding and head are in blocks like Linears.
            is_layer_linear(name) || !format.dense_ends()
        });
        let linears = linears
            .iter()
            .filter_map(|&(name, dims)| Some((name, schemes.of(name)?.affine()?, dims)));
        format.check(linears)?;
        let eight = head_scheme(Bits::B8);
        let more = ends
            .iter()
            .map(|&(_, Dims { rows, cols })| 2 * rows * cols - eight.bytes(rows, cols));
        let more: usize = more.sum();
        Ok((more > 0).then(|| {
            format!(
                "embedding and head stay unquantized, as loaders of {} need them: {} more than \
                 with 8 bits",
                format.name(),
                human_bytes(more as u64)
            )
        }))
    }

    /// Writes the quantized folder in the format and removes it, and updates `report` with the result. Returns what the
    /// format changed; `None` for nq's own.
    ///
    /// # Errors
    /// Errors of the disk; a result that is not read as the quantized folder is, which is then kept.
    pub(crate) fn write(
        &self,
        report: &mut QuantizeReport,
        progress: &dyn Progress,
    ) -> Result<Option<ExportReport>> {
        if self.format == ExportFormat::Nq {
            return Ok(None);
        }
        let folder = self.folder();
        let (written, parameters) = write_from(&folder, self, progress).map_err(|e| {
            e.within(format!(
                "the quantized model is kept in {}",
                folder.display()
            ))
        })?;
        std::fs::remove_dir_all(&folder)
            .map_err(|cause| nq_formats::Error::io(&folder, "remove", cause))?;
        report.out.clone_from(&self.out);
        report.format = self.format.word().to_owned();
        report.tensor_bytes = written.tensor_bytes;
        report.file_bytes = written.file_bytes;
        report.bits_per_weight = 8.0 * written.tensor_bytes as f64 / parameters as f64;
        Ok(Some(written))
    }
}

/// The folder or file written, and the number of parameters of the model.
fn write_from(
    folder: &Path,
    target: &QuantizeTarget,
    progress: &dyn Progress,
) -> Result<(ExportReport, usize)> {
    let options = ExportOptions {
        force: target.force,
        ..ExportOptions::default()
    };
    let checkpoint = Checkpoint::open(folder)?;
    let unchecked = Unchecked::new(&target.out, target.format.form(), target.force)?;
    let out = unchecked.path();
    let report = export(&checkpoint, target.format, &out, &options, progress)?;
    written::check(&checkpoint, &out, &target.out, progress)?;
    unchecked.put()?;
    Ok((report, checkpoint.config().parameters()))
}
