//! `nq quantize --format`: what was quantized, as another engine loads it.
//!
//! The work is done in nq's own folder beside the destination, which can be resumed; once that is
//! complete, it is written in the other format, whole or not at all, and then removed.

use crate::commands::convert::{FormatArg, summary_lines};
use crate::terminal::human_bytes;
use crate::written;
use anyhow::{Context, bail};
use nq_formats::durable::{Unchecked, check_destination};
use nq_formats::export::{ExportFormat, ExportOptions, ExportReport, export};
use nq_formats::{AffineScheme, Bits, Checkpoint, Progress, Scheme};
use nq_model::ModelConfig;
use nq_model::names::{Shape, is_kept, is_layer_linear, parameters};
use nq_quantize::schemes::head_scheme;
use nq_quantize::{QuantizeReport, Schemes};
use nq_quantize::{allocation, groups};
use std::path::{Path, PathBuf};

/// Destination and format of the result.
pub(super) struct Target {
    pub(super) format: FormatArg,
    pub(super) out: PathBuf,
    pub(super) force: bool,
}

impl FormatArg {
    /// The schemes of Linears and of embedding and head, from nq's own and the requested bits.
    pub(super) fn schemes(
        self,
        linears: AffineScheme,
        head_bits: Option<u32>,
        mixed: bool,
    ) -> anyhow::Result<(AffineScheme, Option<AffineScheme>)> {
        let format = self.format();
        let linears = format.scheme(linears.bits, linears)?;
        let bits = match head_bits {
            // As other makers of such files have it; what a mix gives is chosen in these bytes.
            None if self == FormatArg::Gguf && mixed => 6,
            None if format.dense_ends() => 16,
            Some(bits) if bits != 16 && format.dense_ends() => bail!(
                "--head-bits: expected 16, which loaders of {} need, or none",
                format.name()
            ),
            bits => bits.unwrap_or(8),
        };
        let head = match bits {
            16 => None,
            bits => Some(head_scheme(Bits::try_from(bits)?)),
        };
        let head = head.map(|s| format.scheme(s.bits, s)).transpose()?;
        Ok((linears, head))
    }

    /// The schemes of at least `least` bits among which weights can choose; empty if the format has one for all.
    pub(super) fn candidates(self, config: &ModelConfig, least: Bits) -> Vec<Scheme> {
        let groups = groups::groups(config);
        let widths = groups.iter().flat_map(|g| g.weights.iter().map(|w| w.1.1));
        match (self, self.format().candidates(least, widths)) {
            (FormatArg::Nq, _) => allocation::candidates(least),
            (_, candidates) => {
                let candidates = candidates.unwrap_or_default().into_iter();
                candidates.map(Scheme::from).collect()
            }
        }
    }

    /// Suffix of models of this format in nq's own model folder.
    pub(super) fn suffix(self) -> &'static str {
        match self {
            FormatArg::Nq => "",
            FormatArg::Gguf => ".gguf",
            FormatArg::CompressedTensors => ".compressed-tensors",
            FormatArg::Gptq => ".gptq",
            FormatArg::Awq => ".awq",
        }
    }
}

impl Target {
    /// The folder of the quantized model: the destination, or one beside it.
    pub(super) fn folder(&self) -> PathBuf {
        match self.format {
            FormatArg::Nq => self.out.clone(),
            _ => {
                let mut name = self.out.clone().into_os_string();
                name.push(".nq");
                name.into()
            }
        }
    }

    /// Refuses what could not be written in the end, and reports what the format costs.
    pub(super) fn check(
        &self,
        checkpoint: &Checkpoint,
        schemes: &Schemes,
    ) -> anyhow::Result<Option<String>> {
        if self.format == FormatArg::Nq {
            return Ok(None);
        }
        let format = self.format.format();
        check_destination(&self.out, format.form(), self.force)?;
        checkpoint.files().check_apart(&self.out)?;
        let all = parameters(checkpoint.config());
        let matrices = all.iter().filter_map(|(name, shape)| match *shape {
            Shape::Matrix(rows, cols) if !is_kept(name) => Some((name.as_str(), (rows, cols))),
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
            .map(|&(_, (rows, cols))| 2 * rows * cols - eight.bytes(rows, cols));
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

    /// Writes the quantized folder in the format and removes it. Returns lines about changes of
    /// the weights, and updates `report` with the result.
    pub(super) fn write(
        &self,
        report: &mut QuantizeReport,
        progress: &dyn Progress,
    ) -> anyhow::Result<Vec<String>> {
        if self.format == FormatArg::Nq {
            return Ok(Vec::new());
        }
        let folder = self.folder();
        let (written, parameters) = write_from(&folder, self, progress)
            .with_context(|| format!("the quantized model is kept in {}", folder.display()))?;
        std::fs::remove_dir_all(&folder).with_context(|| folder.display().to_string())?;
        let mut lines = summary_lines(&written);
        lines.push(format!(
            "in nq's own format: {} in files",
            human_bytes(report.file_bytes)
        ));
        report.out.clone_from(&self.out);
        report.format = self.format.word();
        report.tensor_bytes = written.tensor_bytes;
        report.file_bytes = written.file_bytes;
        report.bits_per_weight = 8.0 * written.tensor_bytes as f64 / parameters as f64;
        Ok(lines)
    }
}

/// The folder or file written, and the number of parameters of the model.
fn write_from(
    folder: &Path,
    target: &Target,
    progress: &dyn Progress,
) -> anyhow::Result<(ExportReport, usize)> {
    let options = ExportOptions {
        force: target.force,
        ..ExportOptions::default()
    };
    let format: ExportFormat = target.format.format();
    let checkpoint = Checkpoint::open(folder)?;
    let unchecked = Unchecked::new(&target.out, format.form(), target.force)?;
    let out = unchecked.path();
    let report = export(&checkpoint, format, &out, &options, progress)?;
    written::check(&checkpoint, &out, &target.out, progress)?;
    unchecked.put()?;
    Ok((report, checkpoint.config().parameters()))
}
