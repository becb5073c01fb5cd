//! Chat templates of hostile models, rendered as in `nq`: in a process of their own.

use nq_formats::Files;
use nq_runtime::chat_template::{Isolation, isolate};
use nq_runtime::{ChatTemplate, Message};
use std::process::Command;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// From now on, renders in processes of the real binary.
fn isolated() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        isolate(Isolation {
            command: || {
                let mut command = Command::new(env!("CARGO_BIN_EXE_nq"));
                command.arg("template-process");
                Ok(command)
            },
            interrupted: || INTERRUPTED.load(Ordering::SeqCst),
        });
    });
}

fn render(source: &str) -> nq_runtime::Result<String> {
    isolated();
    let template = ChatTemplate::from_source("t.jinja", source)?;
    template.render(&[Message::new("user", "x")], None, true, None)
}

/// Each of these cases once hung, aborted or filled the memory of the program.
#[test]
fn what_harms_its_process_is_an_error() {
    let chain = |start: &str, link: &str, end: &str| {
        let n = 100_000.min(262_000 / link.len());
        format!("{{{{ {start}{}{end} }}}}", link.repeat(n))
    };
    let cases = [
        // endless
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}".into(),
        "{% for i in range(99999) %}{{ range(99999)|list|tojson|length }}{% endfor %}".into(),
        // values that contain themselves, or nest deeply
        "{% set ns = namespace(s=1) %}{% set ns.s = ns %}{{ ns }}".into(),
        "{% set a = namespace() %}{% set b = namespace(s=a) %}{% set a.s = b %}{{ a == b }}".into(),
        "{% set a = namespace() %}{% set a.s = [a] %}{{ a|tojson }}".into(),
        "{% set ns = namespace(s=1) %}{% for i in range(99999) %}{% set ns.s = [ns.s] %}{% endfor %}\
         {{ ns.s|string|length }}{{ raise_exception('deep enough') }}"
            .into(),
        // chains of operators
        chain("1", "+1", "") + "{{ raise_exception('long') }}",
        chain("", "not ", "1") + "{{ raise_exception('long') }}",
        chain("", "-", "1") + "{{ raise_exception('long') }}",
        chain("a", ".b", ""),
        chain("a", "|list", "") + "{{ raise_exception('long') }}",
        // memory
        "{% set ns=namespace(s='x') %}{% for i in range(40) %}{% set ns.s=ns.s~ns.s %}{% endfor %}"
            .into(),
        "{{ messages|slice(1000000000)|list }}".into(),
        "{{ 'a b'|indent(width=9223372036854775807) }}".into(),
        "{{ 'a\nb'|indent(width=9223372036854775807) }}".into(),
        "{{ messages|batch(9223372036854775807, 'x')|list }}".into(),
        "{{ '%999999999999d' % 1 }}{{ '{:>99999999999}'.format('x') }}".into(),
        "{{ ('x' * 9999999)|replace('', 'x' * 9999)|length }}".into(),
        "{{ messages|tojson(indent=9223372036854775807) }}".into(),
        // panics
        "{{ 1 is divisibleby 0 }}".into(),
    ];
    for source in cases {
        let start = Instant::now();
        let error = render(&source).expect_err(&source[..source.len().min(80)]);
        let error = error.to_string();
        assert!(
            error.starts_with("t.jinja: chat template: "),
            "{error:.300}"
        );
        assert!(
            start.elapsed() < Duration::from_secs(30),
            "{source:.80}: {error:.300}"
        );
    }
    // This process is unaffected and renders on.
    assert_eq!(render("{{ messages[0].content }}").unwrap(), "x");
}

#[test]
fn a_template_goes_on_after_one_rendering_failed() {
    isolated();
    let source = "{% if messages|length > 1 %}{{ messages|slice(1000000000)|list }}\
                  {% else %}{{ messages[0].content }}{% endif %}";
    let template = ChatTemplate::from_source("t.jinja", source).unwrap();
    let one = [Message::new("user", "x")];
    let two = [Message::new("user", "x"), Message::new("user", "y")];
    for _ in 0..2 {
        assert_eq!(template.render(&one, None, true, None).unwrap(), "x");
        let error = template.render(&two, None, true, None).unwrap_err();
        assert!(error.to_string().contains("1.07 GB of memory"), "{error}");
    }
}

/// Templates in use render the same as in this process, in less time than a token takes.
#[test]
fn the_demo_template_renders_alike_and_fast() {
    isolated();
    let template = ChatTemplate::from_files(&Files::Folder(nq_testkit::demo()));
    let template = template.unwrap();
    let messages = [
        Message::new("user", "a \u{1b}\" é \u{10fffd}"),
        Message::new("assistant", "<think>\nwhy\n</think>\n\nb"),
        Message::new("user", "c"),
    ];
    let expected = "<|im_start|>user\na \u{1b}\" é \u{10fffd}<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n\
                    <|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";
    let mut times = Vec::new();
    for _ in 0..20 {
        let start = Instant::now();
        let found = template.render(&messages, None, true, Some(false));
        times.push(start.elapsed());
        assert_eq!(found.unwrap(), expected);
    }
    times.sort();
    assert!(times[10] < Duration::from_millis(50), "{times:?}");
}
