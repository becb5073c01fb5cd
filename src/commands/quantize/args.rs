//! Flags of `nq quantize`, and what they ask of the library.

use crate::commands::convert::FormatArg;
use crate::demo;
use crate::flags::{Global, conflict, parse_size};
use anyhow::{Context, bail};
use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser};
use nq_formats::nq::SourceRecord;
use nq_formats::trellis::Code;
use nq_formats::{AffineScheme, Bits, Group, Scheme, Zeros};
use nq_model::ModelConfig;
use nq_quantize::allocation;
use nq_quantize::methods::{self, METHODS};
use nq_quantize::mix;
use nq_quantize::pipeline::QuantizeOptions;
use nq_quantize::schemes::{GROUP_SIZES, default_scheme, head_scheme};
use nq_quantize::{CalibrationSource, Codes, Effort, Limits, Schemes, TargetSize, TuneOptions};
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
    /// Trellis codes, of 2, 2.5, 3, 3.5, 4, 5 or 6 bits, instead of integer codes: two fifths less divergence in the
    /// same bytes. CPUs read prompts more slowly, those with AVX2 alone decode at 0.3 of the speed, GPUs at 0.55 to
    /// 0.7; GPUs hold experts as FP16. Embedding and head get two bits more. `--trellis=sum` (2, 3, 4, 5 or 6) has a
    /// tenth less divergence than octagon, the default, and products take twice the time
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
    /// Choose the bits (at least --bits) and group size of each weight by measured sensitivity, for
    /// this many bits per weight on average
    #[arg(long, value_name = "X",
          conflicts_with_all = ["group_size", "asym", "sym", "simple"])]
    pub target_bpw: Option<f64>,
    /// The same for a total size of all tensors, e.g. 400MB
    #[arg(long, value_name = "SIZE", value_parser = parse_size,
          conflicts_with_all = ["target_bpw", "group_size", "asym", "sym", "simple"])]
    pub target_size: Option<u64>,
    /// Search the clipping range of each group (rtn; always on for awq and gptq)
    #[arg(long)]
    pub clip: bool,
    /// Folder or file to write [default: a folder in nq's own model folder, by the name of --name]
    #[arg(long, value_name = "PATH")]
    pub out: Option<PathBuf>,
    /// Name in nq's own model folder, as `nq list` shows it [default: the model's, and what was asked for]
    #[arg(long, conflicts_with = "out", value_parser = parse_name)]
    pub name: Option<String>,
    /// Format to write; quality is measured on the same weights in nq's own format
    #[arg(long, value_enum, default_value_t = FormatArg::Nq)]
    pub format: FormatArg,
    /// Replace an existing output
    #[arg(long)]
    pub force: bool,
    /// Calibration text: self (sampled from the model) or a .txt or .jsonl file
    #[arg(long, default_value = "self", value_name = "self|FILE")]
    pub calib: String,
    /// Calibration tokens [default: 32,768; on a CPU fewer for models of more than 229 million parameters]
    #[arg(long, value_name = "N", value_parser = parse_tokens)]
    pub calib_tokens: Option<usize>,
    /// Seed of everything random
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Raise bits until the mean KL divergence from the source, in nats per token, is at most this
    /// (e.g. 0.02), or fail; with a target size, bits are not raised
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
    match s {
        "channel" => Ok(Group::Channel),
        size => match size.parse() {
            Ok(size) if GROUP_SIZES.contains(&size) => Ok(Group::Size(size)),
            _ => Err("expected 32, 64, 128 or channel".into()),
        },
    }
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
        if let Err(e) = self.codes() {
            return Err(conflict("quantize", format!("--{e}")));
        }
        if self.trellis.is_some() && self.format != FormatArg::Nq {
            let what = "--trellis: only nq's own format has trellis codes: expected --format nq";
            return Err(conflict("quantize", what));
        }
        let tuning = [
            (self.tune_steps.is_some(), "--tune-steps"),
            (self.budget.is_some(), "--budget"),
        ];
        let given = tuning.into_iter().find(|(given, _)| *given);
        if let Some((_, flag)) = given.filter(|_| self.method != AUTO) {
            return Err(conflict("quantize", format!("{flag} needs --method auto")));
        }
        if self.target().is_some() && !self.chooses() {
            return Err(conflict(
                "quantize",
                "--target-bpw and --target-size choose among schemes: expected --format nq, or gguf \
                 without --method auto",
            ));
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

    /// The options of the library for these flags, with `schemes`, written to `out`.
    pub(super) fn options(
        &self,
        global: &Global,
        schemes: Schemes,
        candidates: Vec<Scheme>,
        out: PathBuf,
        source: SourceRecord,
    ) -> QuantizeOptions {
        QuantizeOptions {
            bits: schemes.linears.bits(),
            schemes,
            candidates,
            target: self.target(),
            head_fixed: self.head_bits.is_some(),
            method: self.method().into(),
            tuning: self.tuning(),
            calibration: self.calibration(),
            calib_tokens: self.calib_tokens,
            seed: self.seed,
            limits: Limits {
                max_kld: self.max_kld,
                min_top1: self.min_top1,
            },
            measure: !self.no_measure,
            eval_text: self.eval_text.clone(),
            eval_tokens: self.eval_tokens,
            out,
            force: self.force,
            resume: self.resume,
            source,
            load: global.load_options(),
            device_memory: self.device_memory,
        }
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

    fn target(&self) -> Option<TargetSize> {
        let bits = self.target_bpw.map(TargetSize::BitsPerWeight);
        self.target_size.map(TargetSize::Bytes).or(bits)
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

    fn codes(&self) -> nq_quantize::Result<Codes> {
        Codes::of_bits(self.bits, self.trellis)
    }

    /// The schemes to begin with, where each weight may have its own.
    fn schemes(&self) -> anyhow::Result<Schemes> {
        let bits = match self.codes()? {
            Codes::Integer(bits) => bits,
            Codes::Trellis(linears) => {
                let usual = Schemes::trellis(linears);
                let head = match self.head_bits {
                    None => usual.head,
                    Some(16) => None,
                    Some(8) => Some(head_scheme(Bits::B8).into()),
                    Some(bits) => match Codes::of_bits(bits as f32, self.trellis)? {
                        Codes::Trellis(scheme) => Some(scheme.into()),
                        Codes::Integer(_) => None,
                    },
                };
                return Ok(Schemes { head, ..usual });
            }
        };
        let (default, head) = self.usual(default_scheme(bits), self.head_bits)?;
        let zeros = match (self.asym, self.sym) {
            (true, _) => Zeros::Integer,
            (_, true) => Zeros::None,
            _ => default.zeros,
        };
        let group = self.group_size.unwrap_or(default.group);
        let super_blocks = self.format == FormatArg::Gguf && !default.scales.is_half();
        let linears = match (zeros, group) == (default.zeros, default.group) {
            true => default,
            // Super-blocks have groups and offsets of their own; the other blocks take these.
            false if super_blocks => AffineScheme::new(bits, group, zeros),
            false => AffineScheme {
                group,
                zeros,
                ..default
            },
        };
        Ok(Schemes {
            linears: linears.into(),
            head: head.map(Scheme::from),
            ..Schemes::defaults(default.bits)
        })
    }

    /// The schemes of Linears and of embedding and head without the other flags, `own` being nq's.
    fn usual(
        &self,
        own: AffineScheme,
        head_bits: Option<u32>,
    ) -> anyhow::Result<(AffineScheme, Option<AffineScheme>)> {
        let (linears, head) = self.format.schemes(own, head_bits, self.mixes())?;
        // Tuning knows integer zero-points, which fit blocks without super-blocks.
        let tuned = self.format == FormatArg::Gguf && self.method == AUTO;
        let group = Group::Size(32);
        Ok((
            if tuned {
                AffineScheme { group, ..own }
            } else {
                linears
            },
            head,
        ))
    }

    /// True if each weight may have a scheme of its own.
    fn chooses(&self) -> bool {
        match self.format {
            FormatArg::Nq => true,
            FormatArg::Gguf => self.method != AUTO,
            _ => false,
        }
    }

    /// True if flags ask for one scheme for all layers.
    fn is_one(&self) -> bool {
        let layers = self.simple || self.asym || self.sym || self.group_size.is_some();
        layers || self.head_bits.is_some()
    }

    /// True if layers, embedding and head get a mix of schemes, that is, if no flag asks for one scheme.
    fn mixes(&self) -> bool {
        let mixes = self.chooses() && !self.is_one();
        mixes && self.target().is_none() && self.bits < 8.0
    }

    /// The schemes that the run begins with, and those among which weights can choose if these do not do.
    pub(super) fn initial(&self, config: &ModelConfig) -> anyhow::Result<(Schemes, Vec<Scheme>)> {
        let base = self.schemes()?;
        let Scheme::Affine(linears) = base.linears else {
            let schemes = match (base.linears.trellis(), self.mixes()) {
                (Some(linears), true) => mix::usual_trellis(config, linears)?,
                _ => base,
            };
            let code = self.trellis.unwrap_or(Code::Octagon);
            return Ok((schemes, allocation::trellis_candidates(code, self.bits)));
        };
        let bits = linears.bits;
        let mixing = self
            .mixes()
            .then(|| self.candidates(config, mix::least(bits)));
        let candidates = self.candidates(config, bits);
        let schemes = mix::initial(config, base, mixing.as_deref(), &candidates)?;
        Ok((schemes, candidates))
    }

    /// The schemes of at least `least` bits among which weights can choose; empty if the flags leave no choice.
    fn candidates(&self, config: &ModelConfig, least: Bits) -> Vec<Scheme> {
        match self.chooses() {
            true => self.format.candidates(config, least),
            false => Vec::new(),
        }
    }

    /// The folder's name in nq's own model folder: the model and what differs from the format's
    /// defaults.
    pub(super) fn default_name(&self, model: &str, schemes: &Schemes) -> anyhow::Result<String> {
        let mut name = match self.trellis {
            None => format!("{model}-int{}", self.bits),
            Some(Code::Octagon) => format!("{model}-trellis{}", self.bits),
            Some(Code::Sum) => format!("{model}-trellis{}-sum", self.bits),
        };
        let (linears, head) = match schemes.linears {
            Scheme::Affine(scheme) => {
                let (linears, head) = self.usual(default_scheme(scheme.bits), None)?;
                (Scheme::from(linears), head.map(Scheme::from))
            }
            Scheme::Trellis(scheme) => (scheme.into(), Schemes::trellis(scheme).head),
        };
        if self.simple {
            name += "-simple";
        }
        if self.method == AUTO {
            name += "-auto";
        }
        if self.method() != "gptq" {
            name += &format!("-{}", self.method());
        }
        if schemes.linears.group() != linears.group() {
            name += &format!("-{}", schemes.linears.group());
        }
        let zeros = |s: Scheme| s.affine().map(|s| s.zeros);
        if zeros(schemes.linears) != zeros(linears) {
            name += match zeros(schemes.linears) {
                Some(Zeros::None) => "-sym",
                _ => "-asym",
            };
        }
        if schemes.head != head {
            let bits = schemes.head.map_or(16.0, Scheme::bits);
            name += &format!("-head{bits}");
        }
        match self.target() {
            Some(TargetSize::Bytes(n)) => name += &format!("-{n}bytes"),
            Some(TargetSize::BitsPerWeight(x)) => name += &format!("-{x}bpw"),
            None => {}
        }
        Ok(name + self.format.suffix())
    }
}

#[cfg(test)]
mod tests {
    use super::{Bits, Global, QuantizeArgs, QuantizeOptions, SourceRecord, parse_share};
    use clap::Parser;
    use nq_model::Preset;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        args: QuantizeArgs,
    }

    #[derive(Parser)]
    struct Shared {
        #[command(flatten)]
        global: Global,
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
        ] {
            let words = ["nq", "demo"].into_iter().chain(flags.split_whitespace());
            let Program { args } = Program::try_parse_from(words).unwrap();
            let schemes = args.schemes().unwrap();
            assert_eq!(args.default_name("demo", &schemes).unwrap(), expected);
        }
    }

    /// A program that asks the library gets what the command makes.
    #[test]
    fn the_library_has_the_defaults_of_the_command() {
        for preset in ["qwen3-0.6b", "qwen3-8b"] {
            let config = Preset::find(preset).unwrap().config();
            for bits in Bits::ALL {
                let flag = u32::from(bits).to_string();
                let words = ["nq", "demo", "--bits", &flag];
                let Program { args } = Program::try_parse_from(words).unwrap();
                let Shared { global } = Shared::try_parse_from(["nq"]).unwrap();
                let (schemes, candidates) = args.initial(&config).unwrap();
                let source = SourceRecord::default();
                let command = args.options(&global, schemes, candidates, "out".into(), source);
                let library = QuantizeOptions::new(&config, bits, "out").unwrap();
                assert_eq!(format!("{command:?}"), format!("{library:?}"));
            }
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
