//! Flags of `nq quantize`, and what they ask of the library.

use crate::commands::convert::FormatArg;
use crate::demo;
use crate::flags::{Global, conflict, parse_size};
use anyhow::{Context, bail};
use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser};
use nq_formats::export::ExportFormat;
use nq_formats::nq::SourceRecord;
use nq_formats::trellis::Code;
use nq_formats::{Bits, Group, Zeros};
use nq_model::ModelConfig;
use nq_quantize::methods::{self, METHODS};
use nq_quantize::pipeline::QuantizeOptions;
use nq_quantize::{
    CalibrationSource, Codes, Effort, QualityLimits, Recipe, TargetSize, TuneOptions, group_named,
};
use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Flags of `nq quantize`.
#[derive(Args, Debug)]
#[command(allow_negative_numbers = true)]
pub struct QuantizeArgs {
    /// demo, a folder, a hub id or a name from `nq list` [default: Qwen/Qwen3-0.6B]
    pub model: Option<OsString>,
    /// Bits of a weight: 3, 4, 5, 6 or 8. Up to 6, schemes are mixed: the parts of the model get those that
    /// are expected to lose least quality, at the size of one scheme for all layers with an 8-bit embedding and head
    #[arg(long, default_value = "4", value_parser = parse_bits)]
    pub bits: f32,
    /// Trellis codes instead of integers: two fifths less divergence in the same bytes. Their --bits are 2, 2.5, 3,
    /// 3.5, 4, 5 or 6. CPUs read prompts more slowly, those with AVX2 alone decode at 0.3 of the speed, GPUs at 0.55 to
    /// 0.7. Embedding and head get two bits more. `--trellis=sum` (2, 3, 4, 5 or 6) has a tenth less divergence than
    /// octagon, the default, and products take twice the time
    #[arg(long, value_name = "CODE", num_args = 0..=1, require_equals = true, default_missing_value = "octagon",
          conflicts_with_all = ["group_size", "asym", "sym", "clip"])]
    pub trellis: Option<Code>,
    /// One scheme for all layers, with an 8-bit embedding and head, instead of a mix; at 4 and 8 bits, other
    /// formats can represent the result
    #[arg(long)]
    pub simple: bool,
    /// How codes are chosen
    #[arg(long, default_value = "gptq", value_parser = method_names())]
    pub method: String,
    /// Minutes that tuning may take (auto) [default: 30 on a CPU; 90 s plus 25 s per billion parameters
    /// on a GPU]
    #[arg(long, value_name = "MIN", value_parser = parse_minutes)]
    pub budget: Option<f64>,
    /// Number of tuning steps, instead of a time; the same number gives the same file (auto)
    #[arg(long, value_name = "N", conflicts_with = "budget", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub tune_steps: Option<u32>,
    /// Sequences per tuning step (auto)
    #[arg(long, default_value_t = 32, value_name = "N", requires = "tune_steps", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub tune_batch: u32,
    /// Inputs that share a scale, for all layers: 32, 64, 128 or channel [default: 64 at 4 and 6 bits,
    /// 128 at 8, else 32]
    #[arg(long, value_name = "N", value_parser = parse_group)]
    pub group_size: Option<Group>,
    /// Store a zero-point per group, for all layers [default: below 6 bits]
    #[arg(long, conflicts_with = "sym")]
    pub asym: bool,
    /// No zero-points, for all layers [default: at 6 and 8 bits]
    #[arg(long)]
    pub sym: bool,
    /// Bits of the embedding and head: 3, 4, 5, 6, 8 or 16, with one scheme for all layers [default:
    /// mixed; with one scheme 8, or 16 if the format requires it]
    #[arg(long, value_name = "N", value_parser = parse_head_bits)]
    pub head_bits: Option<u32>,
    /// Bits of the Linears of the tower that sees images, where their rows are whole groups of 32: 8 or 16
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = parse_vision_bits)]
    pub vision_bits: u32,
    /// Bits of tables of n-grams, which are read by rows from the file: 4, 8 or 16 (as they are)
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = parse_table_bits)]
    pub table_bits: u32,
    /// Choose the bits (at least --bits) and group size of each weight by measured sensitivity, for
    /// this many bits per weight on average
    #[arg(long, value_name = "X",
          conflicts_with_all = ["group_size", "asym", "sym", "simple"])]
    pub target_bpw: Option<f64>,
    /// Choose the bits of each weight so that all tensors take this much, e.g. 400MB
    #[arg(long, value_name = "SIZE", value_parser = parse_size,
          conflicts_with_all = ["target_bpw", "group_size", "asym", "sym", "simple"])]
    pub target_size: Option<u64>,
    /// Search the clipping range of each group (rtn; always on for awq and gptq)
    #[arg(long)]
    pub clip: bool,
    /// Folder or file to write [default: by --name, in nq's own folder]
    #[arg(long, value_name = "PATH")]
    pub out: Option<PathBuf>,
    /// Name in `nq list` [default: the model's, and what was asked for]
    #[arg(long, conflicts_with = "out", value_parser = parse_name)]
    pub name: Option<String>,
    /// Format to write. Quality is measured on the same weights in nq's own format
    #[arg(long, value_enum, default_value_t = FormatArg::Nq)]
    pub format: FormatArg,
    /// Replace an existing output
    #[arg(long)]
    pub force: bool,
    /// Calibration text: self (sampled from the model) or a .txt or .jsonl file, whose chats may hold images
    #[arg(long, default_value = "self", value_name = "self|FILE")]
    pub calib: String,
    /// Calibration tokens [default: 32,768; on a CPU fewer for models of more than 229 million parameters]
    #[arg(long, value_name = "N", value_parser = parse_tokens)]
    pub calib_tokens: Option<usize>,
    /// Seed of everything random
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Raise bits until the mean KL divergence from the source is at most this, e.g. 0.02. It is in nats per token. If
    /// no bits suffice, nothing is written; with a target size, bits are not raised
    #[arg(long, value_name = "X", value_parser = parse_kld)]
    pub max_kld: Option<f64>,
    /// The same until the best token agrees at this share of positions, e.g. 0.95 or 95%
    #[arg(long, value_name = "Y", value_parser = parse_share)]
    pub min_top1: Option<f64>,
    /// Do not measure the quality of the result; the file says so. Saves the time of sampling a text for that, and
    /// of running source and result on it
    #[arg(long, conflicts_with_all = ["max_kld", "min_top1", "eval_text"])]
    pub no_measure: bool,
    /// Text to measure quality on [default: held-out text sampled from the model]
    #[arg(long, value_name = "FILE")]
    pub eval_text: Option<PathBuf>,
    /// Tokens to measure quality on, at most [default: half of the calibration tokens, at most 8,192]
    #[arg(long, value_name = "N", value_parser = parse_tokens)]
    pub eval_tokens: Option<usize>,
    /// Use at most this much GPU memory, e.g. 12GB [default: all that is free]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub device_memory: Option<u64>,
    /// Print the plan, the time and the memory it needs, and stop
    #[arg(long)]
    pub dry_run: bool,
    /// Continue an interrupted run
    #[arg(long)]
    pub resume: bool,
}

/// The method that is gptq and tuning.
const AUTO: &str = "auto";

/// The methods of the library, but those that `--clip` names, and [`AUTO`].
fn method_names() -> PossibleValuesParser {
    let named = |name| METHODS.iter().any(|m| m.clip == Some(name));
    let values = METHODS.iter().filter(|m| !named(m.name));
    let values = values.map(|m| PossibleValue::new(m.name).help(m.about));
    let auto = "gptq, then tuned end to end against the source's logits while that helps";
    PossibleValuesParser::new(values.chain([PossibleValue::new(AUTO).help(auto)]))
}

/// Bits of either kind of code; which of them the other flags allow is checked with these.
fn parse_bits(s: &str) -> Result<f32, String> {
    let known = |bits: &f32| {
        let mut kinds = [None, Some(Code::Octagon), Some(Code::Sum)].into_iter();
        kinds.any(|kind| Codes::of_bits(*bits, kind).is_ok())
    };
    let bits = s.parse().ok().filter(known);
    bits.ok_or_else(|| "expected 3, 4, 5, 6 or 8; with --trellis 2, 2.5, 3, 3.5, 4, 5 or 6".into())
}

/// A name in nq's own model folder, which is no path.
fn parse_name(s: &str) -> Result<String, String> {
    let plain = !s.is_empty() && !s.starts_with(['.', '-']) && !s.contains(['/', '\\', ':']);
    let temporary = s.ends_with(".partial");
    match plain && !temporary && s != demo::LABEL {
        true => Ok(s.to_owned()),
        false => {
            Err("expected a name without /, \\ and :, which is not demo; --out takes paths".into())
        }
    }
}

fn parse_head_bits(s: &str) -> Result<u32, String> {
    let known = |n: &u32| *n == 16 || Bits::try_from(*n).is_ok();
    let bits = s.parse().ok().filter(known);
    bits.ok_or_else(|| "expected 3, 4, 5, 6, 8 or 16".into())
}

fn parse_vision_bits(s: &str) -> Result<u32, String> {
    let bits = s.parse().ok().filter(|n| [8, 16].contains(n));
    bits.ok_or_else(|| "expected 8 or 16".into())
}

fn parse_table_bits(s: &str) -> Result<u32, String> {
    let bits = s.parse().ok().filter(|n| [4, 8, 16].contains(n));
    bits.ok_or_else(|| "expected 4, 8 or 16".into())
}

fn parse_minutes(s: &str) -> Result<f64, String> {
    match s.parse() {
        Ok(m) if m > 0.0 && m <= 1e6 => Ok(m),
        _ => Err("expected minutes, more than 0".into()),
    }
}

fn parse_kld(s: &str) -> Result<f64, String> {
    match s.parse() {
        Ok(x) if x > 0.0 && f64::is_finite(x) => Ok(x),
        _ => Err("expected nats per token, more than 0".into()),
    }
}

fn parse_share(s: &str) -> Result<f64, String> {
    let (number, whole) = match s.strip_suffix('%') {
        Some(percent) => (percent.trim_end(), 100.0),
        None => (s, 1.0),
    };
    match number.parse::<f64>() {
        Ok(y) if (0.0..=whole).contains(&y) => Ok(y / whole),
        _ => Err("expected a share, 0 to 1, or a percentage such as 95%".into()),
    }
}

fn parse_tokens(s: &str) -> Result<usize, String> {
    match s.replace('_', "").parse() {
        Ok(n @ 1..=1_000_000_000) => Ok(n),
        _ => Err("expected a number of tokens, at least 1".into()),
    }
}

fn parse_group(s: &str) -> Result<Group, String> {
    group_named(s).ok_or_else(|| "expected 32, 64, 128 or channel".into())
}

/// An error unless `path` is a file that can be read, before there is work that it would cost.
fn check_text(path: &Path, flag: &str) -> anyhow::Result<()> {
    let file = File::open(path).with_context(|| format!("{flag} {}", path.display()))?;
    if file.metadata()?.is_dir() {
        bail!("{flag} {}: expected a file, found a folder", path.display());
    }
    Ok(())
}

impl QuantizeArgs {
    /// Refuses flags that contradict each other in ways clap's own rules cannot tell.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        match self.recipe().and_then(|recipe| recipe.check()) {
            Err(e @ nq_quantize::Error::Request { .. }) => {
                return Err(conflict("quantize", format!("--{e}")));
            }
            checked => checked?,
        }
        let tuning = [
            (self.tune_steps.is_some(), "--tune-steps"),
            (self.budget.is_some(), "--budget"),
        ];
        let given = tuning.into_iter().find(|(given, _)| *given);
        if let Some((_, flag)) = given.filter(|_| self.method != AUTO) {
            return Err(conflict("quantize", format!("{flag} needs --method auto")));
        }
        if let CalibrationSource::File(path) = self.calibration() {
            check_text(&path, "--calib")?;
            let extension = path.extension().and_then(|e| e.to_str());
            if !extension.is_some_and(|e| ["txt", "jsonl"].contains(&e)) {
                bail!(
                    "--calib {}: expected `self` or a file that ends in .txt or .jsonl",
                    path.display()
                );
            }
        }
        self.eval_text
            .as_deref()
            .map_or(Ok(()), |path| check_text(path, "--eval-text"))
    }

    /// The options of the library for these flags and a model of this shape, written to `out`.
    pub(super) fn options(
        &self,
        global: &Global,
        config: &ModelConfig,
        out: PathBuf,
        source: SourceRecord,
    ) -> nq_quantize::Result<QuantizeOptions> {
        Ok(QuantizeOptions {
            method: self.method().into(),
            calibration: self.calibration(),
            calib_tokens: self.calib_tokens,
            seed: self.seed,
            limits: QualityLimits {
                max_kld: self.max_kld,
                min_top1: self.min_top1,
            },
            measure: !self.no_measure,
            eval_text: self.eval_text.clone(),
            eval_tokens: self.eval_tokens,
            force: self.force,
            resume: self.resume,
            source,
            load: global.load_options(),
            device_memory: self.device_memory,
            ..QuantizeOptions::new(config, self.recipe()?, out)?
        })
    }

    fn calibration(&self) -> CalibrationSource {
        match self.calib.as_str() {
            "self" => CalibrationSource::SelfSampled,
            path => CalibrationSource::File(path.into()),
        }
    }

    fn method(&self) -> &'static str {
        let name = match self.method.as_str() {
            AUTO => "gptq",
            name => name,
        };
        let method = methods::find(name).expect("the flag takes no other");
        method.clip.filter(|_| self.clip).unwrap_or(method.name)
    }

    /// What the flags ask for.
    pub(super) fn recipe(&self) -> nq_quantize::Result<Recipe> {
        let bits = self.target_bpw.map(TargetSize::BitsPerWeight);
        let zeros = match (self.asym, self.sym) {
            (true, _) => Some(Zeros::Integer),
            (_, true) => Some(Zeros::None),
            _ => None,
        };
        Ok(Recipe {
            format: self.format.format(),
            tuning: self.tuning(),
            simple: self.simple,
            group: self.group_size,
            zeros,
            head_bits: self.head_bits,
            vision_8: self.vision_bits == 8,
            table_bits: Bits::try_from(self.table_bits).ok(),
            target: self.target_size.map(TargetSize::Bytes).or(bits),
            ..Codes::of_bits(self.bits, self.trellis)?.into()
        })
    }

    fn tuning(&self) -> Option<TuneOptions> {
        let effort = match self.tune_steps {
            Some(steps) => Effort::Steps {
                steps: steps as usize,
                batch: self.tune_batch as usize,
            },
            None => match self.budget {
                Some(minutes) => Effort::Budget(Duration::from_secs_f64(60.0 * minutes)),
                None => Effort::Default,
            },
        };
        (self.method == AUTO).then_some(TuneOptions { effort })
    }

    /// The folder's name in nq's own model folder: the model and what differs from the format's
    /// defaults.
    pub(super) fn default_name(&self, model: &str) -> anyhow::Result<String> {
        let recipe = self.recipe()?;
        let mut name = format!("{model}-{}", recipe.label()?);
        if self.method == AUTO {
            name += "-auto";
        }
        if self.method() != "gptq" {
            name += &format!("-{}", self.method());
        }
        name += &recipe.differences()?;
        if recipe.format != ExportFormat::Nq {
            name += &format!(".{}", recipe.format.word());
        }
        Ok(name)
    }
}

#[cfg(test)]
mod tests {
    use super::{QuantizeArgs, parse_share};
    use clap::Parser;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        args: QuantizeArgs,
    }

    #[test]
    fn names_say_what_differs_from_the_formats_defaults() {
        for (flags, expected) in [
            ("", "demo-int4"),
            ("--bits 8", "demo-int8"),
            ("--format gguf", "demo-int4.gguf"),
            ("--format gptq --head-bits 16", "demo-int4.gptq"),
            ("--format awq --group-size 128", "demo-int4-g128.awq"),
            ("--method rtn --clip --sym", "demo-int4-rtn-clip-sym"),
            ("--bits 8 --asym --head-bits 16", "demo-int8-asym-head16"),
            (
                "--method auto --target-size 9MB",
                "demo-int4-auto-9000000bytes",
            ),
            ("--target-bpw 4.5", "demo-int4-4.5bpw"),
            ("--simple", "demo-int4-simple"),
            ("--bits 6 --head-bits 6", "demo-int6-head6"),
            ("--trellis", "demo-trellis4"),
            ("--trellis=sum --bits 3", "demo-trellis3-sum"),
            ("--trellis --bits 3.5 --simple", "demo-trellis3.5-simple"),
            ("--trellis --head-bits 8", "demo-trellis4-head8"),
            ("--vision-bits 8", "demo-int4-vision8"),
        ] {
            let words = ["nq", "demo"].into_iter().chain(flags.split_whitespace());
            let Program { args } = Program::try_parse_from(words).unwrap();
            assert_eq!(args.default_name("demo").unwrap(), expected);
        }
    }

    #[test]
    fn shares_may_be_percentages() {
        for (text, share) in [("0.95", 0.95), ("95%", 0.95), ("1", 1.0), ("100 %", 1.0)] {
            assert_eq!(parse_share(text), Ok(share), "{text}");
        }
        for text in ["95", "101%", "-1%", "%", "nan", "nan%", ""] {
            assert!(parse_share(text).is_err(), "{text}");
        }
    }
}
