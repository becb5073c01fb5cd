use super::*;
use nq_answers::ModelText;
use nq_formats::Files;
use nq_runtime::{ChatTemplate, KvType, StopReason, Tokenizer};
use nq_testkit::sessions::{FakeSession, session_spec};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A template that strips earlier thinking and inserts an empty one if thinking is off, like
/// Qwen3's.
const TEMPLATE: &str = "\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}\
{%- if m.role == 'assistant' %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}\
{%- else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}\
{%- if enable_thinking is defined and not enable_thinking %}\
{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}";

fn tokenizer() -> Arc<Tokenizer> {
    let demo = nq_testkit::demo();
    Arc::new(Tokenizer::from_files(&Files::Folder(demo)).unwrap())
}

/// The token after those that are `held`, of a model that thinks, then repeats the last user's message and the number of
/// users' messages it sees; the system prompt `long` makes it write a long text.
fn parrot(tokenizer: &Tokenizer, held: &[u32]) -> u32 {
    let header = tokenizer.encode("<|im_start|>assistant\n").unwrap();
    let at = held
        .windows(header.len())
        .rposition(|w| w == header)
        .expect("a generation prompt");
    let before = tokenizer.decode(&held[..at], false);
    let users: Vec<&str> = before.split("<|im_start|>user\n").skip(1).collect();
    let last = users.last().unwrap().split("<|im_end|>").next().unwrap();
    let words = if before.contains("system\nlong") {
        400
    } else {
        1
    };
    let answer = format!("{} of {}: {last}", "word ".repeat(words), users.len());
    let off = tokenizer.encode("<think>\n\n</think>\n\n").unwrap();
    let said = &held[at + header.len()..];
    let thought = if before.contains("system\ndeep") {
        "hm ".repeat(40) + "hm"
    } else {
        "hm".into()
    };
    let close = tokenizer.encode("\n</think>\n\n").unwrap();
    let closed = said.windows(close.len()).position(|w| w == close);
    let (said, answer) = match (said.strip_prefix(off.as_slice()), closed) {
        (Some(said), _) => (said, answer),
        (None, Some(at)) => (&said[at + close.len()..], answer),
        (None, None) => (said, format!("<think>\n{thought}\n</think>\n\n{answer}")),
    };
    let answer = tokenizer.encode(&answer).unwrap();
    let end = tokenizer.token_id("<|im_end|>").unwrap();
    answer.get(said.len()).copied().unwrap_or(end)
}

/// A conversation and its model, for tests.
struct Bench {
    tokenizer: Arc<Tokenizer>,
    text: ModelText,
}

impl Bench {
    fn new() -> Self {
        Bench::with(TEMPLATE)
    }

    fn with(template: &str) -> Self {
        let own = Arc::into_inner(tokenizer()).unwrap();
        let stop = [own.token_id("<|im_end|>").unwrap()];
        let template = ChatTemplate::from_source("test", template).unwrap();
        Bench {
            tokenizer: tokenizer(),
            text: ModelText::new(own, Some(template), &stop, 4096),
        }
    }

    fn talk(&self, ctx: usize, system: Option<&str>, overflow: Overflow) -> Talk<'_> {
        let (fed, tokenizer) = (Arc::new(AtomicUsize::new(0)), Arc::clone(&self.tokenizer));
        let mut session =
            FakeSession::new(session_spec(1, ctx, KvType::F16, 64), 4096, move |held| {
                let mut logits = vec![0.0; 4096];
                logits[parrot(&tokenizer, held) as usize] = 1.0;
                logits
            });
        let counted = Arc::clone(&fed);
        session.before = Box::new(move |chunks| {
            counted.fetch_add(chunks[0].tokens.len(), Ordering::Relaxed);
            Ok(())
        });
        let settings = ChatSettings {
            sampling: SamplingParams::greedy(),
            max_tokens: None,
            thinking_budget: None,
            thinking: None,
            overflow,
            stop: Vec::new(),
        };
        let system = system.map(String::from);
        let model = LocalModel {
            name: "parrot",
            text: &self.text,
            sight: None,
            raw: false,
            session: Box::new(session),
            drafts: None,
        };
        Talk {
            conversation: Conversation::new(model, system, settings),
            notes: Vec::new(),
            fed,
        }
    }
}

struct Talk<'m> {
    conversation: Conversation<'m>,
    notes: Vec<String>,
    fed: Arc<AtomicUsize>,
}

impl Talk<'_> {
    fn ask(&mut self, text: &str) -> anyhow::Result<Turn> {
        self.fed.store(0, Ordering::Relaxed);
        let mut streamed = String::new();
        let notes = &mut self.notes;
        let turn = self
            .conversation
            .ask(text, &AtomicBool::new(false), &mut |event| {
                match event {
                    ChatEvent::Piece(Part::Answer, text) => streamed.push_str(text),
                    ChatEvent::Piece(Part::Thinking, _) => {}
                    ChatEvent::Note(note) => notes.push(note),
                }
                Ok(())
            })?;
        assert_eq!(streamed, turn.answer);
        Ok(turn)
    }
}

#[test]
fn turns_reuse_the_cache_though_thinking_is_stripped() {
    let bench = Bench::new();
    let mut talk = bench.talk(1000, Some("Be brief."), Overflow::Stop);
    let first = talk.ask("one").unwrap();
    assert_eq!(first.thinking, "hm");
    assert_eq!(first.answer, "word  of 1: one");
    assert!(matches!(first.end, End::Generated(StopReason::Eos(_))));
    assert_eq!(first.stats.reused_tokens, 0);
    let second = talk.ask("two").unwrap();
    assert_eq!(second.answer, "word  of 2: two");
    // Kept in the cache: everything up to the first answer, whose thinking is stripped.
    assert_eq!(second.stats.reused_tokens, first.stats.prompt_tokens);
    let rest = second.stats.prompt_tokens - second.stats.reused_tokens;
    assert_eq!(
        talk.fed.load(Ordering::Relaxed),
        rest + second.stats.tokens - 1
    );
    // The thinking stays in the messages, for templates that use it.
    let messages = talk.conversation.chat.messages();
    assert_eq!(messages.len(), 5);
    assert_eq!(messages[0], Message::new("system", "Be brief."));
    assert!(messages[2].text().starts_with("<think>\nhm\n</think>"));
}

/// A template that shows earlier thinking and looks for it in a field alone, as Qwen3.8's does: the chat only grows,
/// and all of it is in the cache.
#[test]
fn a_template_may_keep_the_thinking() {
    let stripped = "{{ m.content.split('</think>')[-1].lstrip('\\n') }}";
    let kept = "{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' + m.content }}";
    assert!(TEMPLATE.contains(stripped));
    let bench = Bench::with(&TEMPLATE.replace(stripped, kept));
    let mut talk = bench.talk(1000, None, Overflow::Stop);
    let first = talk.ask("one").unwrap();
    let second = talk.ask("two").unwrap();
    assert_eq!(second.answer, "word  of 2: two");
    let fed = first.stats.prompt_tokens + first.stats.tokens - 1;
    assert_eq!(second.stats.reused_tokens, fed);
    let answer = &talk.conversation.chat.messages()[1];
    assert_eq!(answer.text(), "word  of 1: one");
    assert_eq!(answer.extra["reasoning_content"], "hm");
}

#[test]
fn thinking_can_be_switched() {
    let bench = Bench::new();
    let mut talk = bench.talk(1000, None, Overflow::Stop);
    assert_eq!(talk.conversation.refuses("thinking"), None);
    talk.conversation.chat.settings.thinking = Some(false);
    let turn = talk.ask("one").unwrap();
    assert_eq!(
        (turn.thinking.as_str(), turn.answer.as_str()),
        ("", "word  of 1: one")
    );
    talk.conversation.chat.settings.thinking = Some(true);
    assert_eq!(talk.ask("two").unwrap().thinking, "hm");

    let fixed = Bench::with("{{ messages[0].content }}");
    let talk = fixed.talk(1000, None, Overflow::Stop);
    let why = talk.conversation.refuses("thinking").unwrap();
    assert!(why.contains("template cannot switch"), "{why}");
    assert_eq!(talk.conversation.refuses("on_overflow"), None);
}

#[test]
fn thinking_ends_with_its_budget() {
    let bench = Bench::new();
    let mut talk = bench.talk(1000, Some("deep"), Overflow::Stop);
    let whole = talk.ask("one").unwrap();
    assert_eq!(whole.thinking.split(' ').count(), 41);
    talk.conversation.chat.settings.thinking_budget = Some(8);
    let cut = talk.ask("two").unwrap();
    let words = cut.thinking.split(' ').count();
    assert!((2..=8).contains(&words), "{:?}", cut.thinking);
    assert_eq!(cut.answer, "word  of 2: two");
    assert!(matches!(cut.end, End::Generated(StopReason::Eos(_))));
    let kept = talk.conversation.chat.messages();
    let kept = kept.last().unwrap().text();
    assert!(kept.ends_with("\n</think>\n\nword  of 2: two"), "{kept}");
    // One that is long enough changes nothing.
    talk.conversation.chat.settings.thinking_budget = Some(1000);
    assert_eq!(talk.ask("three").unwrap().thinking, whole.thinking);
    // The answer still ends with the most tokens or the end of the context.
    talk.conversation.chat.settings.thinking_budget = Some(8);
    talk.conversation.chat.settings.max_tokens = Some(9);
    let turn = talk.ask("four").unwrap();
    assert_eq!(
        (turn.end, turn.answer.as_str()),
        (End::Generated(StopReason::MaxTokens), "")
    );
}

#[test]
fn regenerating_replaces_the_answer() {
    let bench = Bench::new();
    let mut talk = bench.talk(1000, None, Overflow::Stop);
    let flag = AtomicBool::new(false);
    let nothing = talk.conversation.regenerate(&flag, &mut |_| Ok(()));
    assert!(nothing.unwrap_err().to_string().contains("no message"));
    talk.ask("one").unwrap();
    let turn = talk
        .conversation
        .regenerate(&flag, &mut |_| Ok(()))
        .unwrap();
    assert_eq!(turn.answer, "word  of 1: one");
    assert_eq!(talk.conversation.chat.messages().len(), 2);
    // With a temperature, another random stream gives another answer. (All but one
    // logit are equal.)
    talk.conversation.chat.settings.sampling.temperature = 1.0;
    talk.conversation.chat.settings.max_tokens = Some(20);
    let mut again = || {
        talk.conversation
            .regenerate(&flag, &mut |_| Ok(()))
            .unwrap()
    };
    assert_ne!(again().answer, again().answer);
}

#[test]
fn a_full_context_is_said() {
    let bench = Bench::new();
    let mut talk = bench.talk(100, Some("long"), Overflow::Stop);
    let turn = talk.ask("one").unwrap();
    assert_eq!(turn.end, End::Generated(StopReason::ContextFull));
    assert!(
        talk.notes[0].contains("context of 100 tokens is full"),
        "{:?}",
        talk.notes
    );
    let prompt = turn.stats.prompt_tokens;
    assert_eq!(prompt + turn.stats.tokens, 100);
    // The next message does not fit: an error, and the message is not kept.
    let e = talk.ask("two").unwrap_err().to_string();
    assert!(
        e.contains("more than the context of 100 tokens") && e.contains("--on-overflow"),
        "{e}"
    );
    assert_eq!(talk.conversation.chat.messages().len(), 3);
    talk.conversation.chat.clear();
    assert_eq!(
        talk.conversation.chat.messages().len(),
        1,
        "the system prompt stays"
    );
    assert!(talk.ask("three").is_ok());
}

#[test]
fn oldest_turns_are_dropped_before_an_answer() {
    let bench = Bench::new();
    let mut talk = bench.talk(160, Some("Be brief."), Overflow::DropOldest);
    for i in 0..12 {
        let turn = talk.ask(&format!("message number {i}")).unwrap();
        assert!(matches!(turn.end, End::Generated(StopReason::Eos(_))));
        assert!(turn.answer.ends_with(&format!("message number {i}")));
        let messages = talk.conversation.chat.messages();
        assert_eq!(messages[0].role, "system");
        assert_eq!(messages[1].role, "user", "turns are dropped whole");
    }
    assert!(talk.notes.iter().all(|n| n.contains("oldest")));
    assert!(talk.notes.len() >= 5, "{:?}", talk.notes);
    assert!(
        talk.conversation.chat.messages().len() > 3,
        "only as many as needed"
    );
}

#[test]
fn oldest_turns_are_dropped_within_an_answer() {
    let bench = Bench::new();
    let mut talk = bench.talk(500, None, Overflow::DropOldest);
    for i in 0..4 {
        talk.ask(&format!("{i} {}", "filler ".repeat(10))).unwrap();
    }
    let before = talk.conversation.chat.messages().len();
    talk.conversation.chat.set_system(Some("long".into()));
    let turn = talk.ask("x").unwrap();
    // 400 words do not fit beside all turns, but they do nearly alone.
    assert!(
        talk.conversation.chat.messages().len() < before,
        "{:?}",
        talk.notes
    );
    assert!(!talk.notes.is_empty());
    let words = turn.answer.matches("word").count();
    assert!(words > 300, "{words}");
    // If a single message is too long for the context, dropping turns does not help.
    let e = talk.ask(&"filler ".repeat(600)).unwrap_err().to_string();
    assert!(e.contains("500 tokens"), "{e}");
}

#[test]
fn a_failing_listener_ends_the_turn() {
    let bench = Bench::new();
    let mut talk = bench.talk(1000, None, Overflow::Stop);
    let flag = AtomicBool::new(false);
    let result = talk.conversation.ask("one", &flag, &mut |_| {
        Err(std::io::Error::from(std::io::ErrorKind::BrokenPipe).into())
    });
    let e = result.unwrap_err();
    assert!(crate::terminal::is_broken_pipe(&e), "{e}");
    assert!(talk.conversation.chat.messages().is_empty());
}

#[test]
fn an_interrupted_answer_is_kept_and_its_thinking_closed() {
    let bench = Bench::new();
    let mut talk = bench.talk(1000, None, Overflow::Stop);
    let flag = AtomicBool::new(false);
    let turn = talk.conversation.ask("one", &flag, &mut |event| {
        if matches!(event, ChatEvent::Piece(Part::Thinking, _)) {
            flag.store(true, Ordering::Relaxed);
        }
        Ok(())
    });
    let turn = turn.unwrap();
    assert_eq!(turn.end, End::Generated(StopReason::Interrupted));
    assert_eq!(turn.answer, "");
    let text = talk.conversation.chat.messages()[1].text().to_owned();
    assert!(text.contains("</think>"), "{text}");
    assert_eq!(talk.ask("two").unwrap().answer, "word  of 2: two");
}

/// An image stays attached if the message fails, and goes into the chat as other programs write it.
#[test]
fn images_go_with_one_message() {
    let bench = Bench::new();
    let mut talk = bench.talk(1000, None, Overflow::Stop);
    let file = "pictures/tests/fixtures/gray.png";
    let image = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap();
    talk.conversation.chat.attach(image);
    for _ in 0..2 {
        let e = talk.ask("what is it?").unwrap_err().to_string();
        assert!(e.starts_with("parrot reads text alone"), "{e}");
        assert!(talk.conversation.chat.messages().is_empty());
    }
    let attached = &talk.conversation.chat.attached;
    let message = message_with_images(attached, "what is it?").unwrap();
    assert_eq!(message.text(), "what is it?");
    let url = message.content[0]["image_url"]["url"].as_str().unwrap();
    assert!(url.starts_with("data:image/png;base64,iVBOR"), "{url}");
    talk.conversation.chat.clear();
    assert!(talk.ask("one").is_ok());
    talk.conversation.chat.attach(b"no image".to_vec());
    let e = talk.ask("what is it?").unwrap_err().to_string();
    assert!(e.starts_with("no picture"), "{e}");
}
