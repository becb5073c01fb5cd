//! Has a model do the tasks of the protocol.

use anyhow::Context;
use nq_answers::{Answer, Answering, ChatInput, Drawing, Format, ModelText, Thinking, ToolChoice};
use nq_evals::rank::{RankTask, TaskAnswer, TaskAnswers, tasks};
use nq_formats::{Progress, Unit};
use nq_runtime::{Engine, Message, SamplingParams, Sequence, Session, SessionSpec};
use serde_json::json;
use std::ops::ControlFlow;
use std::sync::atomic::AtomicBool;

/// Most tokens of an answer.
const LONGEST: usize = 160;

/// Most positions of a task and its answer.
const CONTEXT: usize = 2048;

/// Answers all tasks greedily, without thinking.
///
/// # Errors
/// Errors of the template, the grammar and the engine.
pub(super) fn answer_tasks(
    engine: &dyn Engine,
    text: &ModelText,
    progress: &dyn Progress,
) -> anyhow::Result<TaskAnswers> {
    let ctx = CONTEXT.min(engine.config().max_position_embeddings);
    let rows = engine.description().prompt_rows().min(ctx);
    let mut session = engine.session(SessionSpec::of_one(ctx, rows))?;
    let tasks = tasks()?;
    progress.begin("calls and JSON", 2 * tasks.len() as u64, Unit::Items);
    let mut found = TaskAnswers::default();
    for task in &tasks {
        for (held, answers) in [(false, &mut found.free), (true, &mut found.held)] {
            let asked = chat(task, held);
            let said = draw(session.as_mut(), text, asked, ctx);
            let said = said.with_context(|| format!("the task {:?}", task.prompt))?;
            answers.push(match (&task.tool, said.calls.first()) {
                (Some(_), Some(call)) => TaskAnswer::new(task, Some(&call.name), &call.arguments),
                _ => TaskAnswer::new(task, None, &said.text),
            });
            progress.advance(1);
        }
    }
    progress.end();
    Ok(found)
}

/// A task as a chat whose answer is `held` to the schema or not.
fn chat(task: &RankTask, held: bool) -> ChatInput {
    let tool = |t: &nq_evals::rank::TaskTool| {
        json!({"type": "function", "function": {
            "name": t.name, "description": t.description, "parameters": task.schema
        }})
    };
    let schema = || Format::Schema(task.schema.clone());
    ChatInput {
        messages: vec![Message::new("user", &task.prompt)],
        choice: match (&task.tool, held) {
            (Some(_), true) => ToolChoice::Required,
            _ => ToolChoice::Auto,
        },
        format: (task.tool.is_none() && held).then(schema),
        tools: task.tool.iter().map(tool).collect(),
        thinking: Thinking {
            switches: Some(false).into(),
            budget: Some(0),
        },
        ..ChatInput::default()
    }
}

fn draw(
    session: &mut dyn Session,
    text: &ModelText,
    chat: ChatInput,
    ctx: usize,
) -> anyhow::Result<Answer> {
    let asked = text.ask(chat, ctx)?;
    let interrupt = AtomicBool::new(false);
    let drawing = Drawing {
        sampling: SamplingParams::greedy(),
        stream: 0,
        logprobs: None,
        max_tokens: LONGEST,
        interrupt: &interrupt,
    };
    let mut answering = Answering::new(text, &asked, drawing)?;
    let mut sequence = Sequence::new(session, 0);
    let each = &mut |_: &_| ControlFlow::Continue(());
    let end = answering.run(session, &mut sequence, &asked.prompt.tokens, each)?;
    Ok(answering.finish(end, each))
}
