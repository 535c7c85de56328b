//! What a template puts around messages, learnt once so that sessions can append.
//!
//! The template is rendered with marker texts as content, for growing conversations. Each longer
//! rendering must begin with the shorter one; what is new is cut at the marker into the text before
//! and after a message of that role.

use super::super::tokenizer::{Piece, Tokenizer};
use super::{ChatTemplate, Message, Role, TemplateError, ToolCall, json};

/// Contents of probe messages. Nothing a template would contain, trim or interpret.
const MARKS: [&str; 7] =
    ["MARK0SYSTEM", "MARK1USER", "MARK2ANSWER", "MARK3USER", "MARK4RESULT", "MARK5RESULT", "MARK6RESULT"];

/// Text around the messages of one role.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Frame {
    before: String,
    after: String,
}

/// How the model writes a tool call inside its answer: `open`, a JSON object with `name` and
/// `arguments`, `close`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCallFrame {
    /// Text before the JSON object.
    pub open: String,
    /// Text after the JSON object.
    pub close: String,
}

/// The start of a conversation, up to the first message after the system message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opening {
    /// Alternating parts, told apart by origin: `true` is the template's own text.
    parts: Vec<(bool, String)>,
}

impl Opening {
    /// The parts for [`Tokenizer::encode_pieces`].
    pub fn pieces(&self) -> Vec<Piece<'_>> {
        let piece = |frame: bool, text| if frame { Piece::Frame(text) } else { Piece::Text(text) };
        self.parts.iter().map(|(frame, text)| piece(*frame, text.as_str())).collect()
    }

    /// The whole text.
    pub fn text(&self) -> String {
        self.parts.iter().map(|(_, text)| text.as_str()).collect()
    }
}

/// The frames of a template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frames {
    start: String,
    system: Frame,
    user: Frame,
    assistant: Frame,
    tool: Frame,
    between_tools: String,
    generation_prompt: String,
    default_system: Option<String>,
    tool_call: Option<ToolCallFrame>,
    fallbacks: Vec<Role>,
}

impl Frames {
    /// Learns the frames of `template`.
    ///
    /// # Errors
    /// [`TemplateError::Frames`] when the template's output for earlier messages depends on later
    /// ones, so that appending would give other text than rendering.
    pub fn probe(template: &ChatTemplate) -> Result<Frames, TemplateError> {
        let talk = [Message::new(Role::System, MARKS[0]), Message::new(Role::User, MARKS[1])];
        let with_system = template.render(&talk, &[], false);
        if with_system.is_ok_and(|text| text.contains(MARKS[0])) {
            match Frames::probe_with(template, true) {
                // Some templates write the system text into the first user message. That cannot be appended to, but
                // they can be used without system messages.
                Err(TemplateError::Frames { problem }) => {
                    Frames::probe_with(template, false).map_err(|_| TemplateError::Frames { problem })
                }
                outcome => outcome,
            }
        } else {
            Frames::probe_with(template, false)
        }
    }

    /// The same, with or without a system message.
    fn probe_with(template: &ChatTemplate, has_system: bool) -> Result<Frames, TemplateError> {
        let probe = Probe { template };
        let [system, user, answer, second] = [
            Message::new(Role::System, MARKS[0]),
            Message::new(Role::User, MARKS[1]),
            Message::new(Role::Assistant, MARKS[2]),
            Message::new(Role::User, MARKS[3]),
        ];
        let mut fallbacks = Vec::new();
        let bare_user = template.render(std::slice::from_ref(&user), &[], false)?;
        let mut talk = if has_system { vec![system] } else { Vec::new() };
        let opening = if has_system { template.render(&talk, &[], false)? } else { String::new() };
        talk.push(user);
        let (user_frame, _) = if has_system {
            probe.appended(&opening, &talk, MARKS[1])?
        } else {
            // Whatever precedes the first message cannot be told from its frame here; the second
            // user message tells them apart below.
            (probe.cut(&bare_user, MARKS[1])?, bare_user.clone())
        };
        let one = template.render(&talk, &[], false)?;
        let prompted = template.render(&talk, &[], true)?;
        let generation_prompt = prompted
            .strip_prefix(&one)
            .ok_or_else(|| not_appending("the generation prompt", &one, &prompted))?
            .to_string();
        talk.extend([answer, second]);
        let (assistant, again) = probe.answered(&one, &talk, &user_frame)?;
        let start_text = user_frame.before.strip_suffix(&again.before);
        if again.after != user_frame.after || start_text.is_none() || (has_system && again != user_frame) {
            let problem = "a later user message is framed differently from the first".to_string();
            return Err(TemplateError::Frames { problem });
        }
        let (start, system) = if has_system {
            probe.system(&talk[0], &opening)?
        } else {
            fallbacks.push(Role::System);
            (start_text.unwrap_or_default().to_string(), again.clone())
        };
        let default_system = default_system(&bare_user, &start, &system, &again);
        talk.truncate(talk.len() - 2);
        let tools = probe.tools(&talk, &one, &generation_prompt, &assistant)?;
        let (tool, between_tools, tool_call) = match tools {
            Some(found) => found,
            None => {
                fallbacks.push(Role::Tool);
                (again.clone(), format!("{}{}", again.after, again.before), None)
            }
        };
        Ok(Frames {
            start,
            system,
            user: again,
            assistant,
            tool,
            between_tools,
            generation_prompt,
            default_system,
            tool_call,
            fallbacks,
        })
    }

    fn frame(&self, role: Role) -> &Frame {
        match role {
            Role::System => &self.system,
            Role::User => &self.user,
            Role::Assistant => &self.assistant,
            Role::Tool => &self.tool,
        }
    }

    /// Text before a message of `role`.
    pub fn before(&self, role: Role) -> &str {
        &self.frame(role).before
    }

    /// Text after a message of `role`.
    pub fn after(&self, role: Role) -> &str {
        &self.frame(role).after
    }

    /// Text between two tool results that follow each other directly, in place of `after` and `before`.
    pub fn between_tools(&self) -> &str {
        &self.between_tools
    }

    /// Text that makes the model answer.
    pub fn generation_prompt(&self) -> &str {
        &self.generation_prompt
    }

    /// Text at the very start of a conversation, such as the name of a start token; often empty.
    pub fn start(&self) -> &str {
        &self.start
    }

    /// The system text the template puts in when a conversation has none.
    pub fn default_system(&self) -> Option<&str> {
        self.default_system.as_deref()
    }

    /// How the model writes tool calls; `None` when its template knows no tools.
    pub fn tool_call(&self) -> Option<&ToolCallFrame> {
        self.tool_call.as_ref()
    }

    /// Roles that the template does not know and that use the user's frame instead.
    pub fn fallbacks(&self) -> &[Role] {
        &self.fallbacks
    }

    /// The start of a conversation with this system text (`None`: the template's default, if it has
    /// one) and these tools, as the template renders it.
    ///
    /// # Errors
    /// [`TemplateError::Render`] when the template refuses the tools; [`TemplateError::Frames`] when its output
    /// cannot be cut before the first message.
    pub fn opening(
        &self,
        template: &ChatTemplate,
        system: Option<&str>,
        tools: &[serde_json::Value],
    ) -> Result<Opening, TemplateError> {
        let mut messages: Vec<Message> =
            system.iter().map(|_| Message::new(Role::System, MARKS[0])).collect();
        if self.fallbacks.contains(&Role::System) {
            messages.iter_mut().for_each(|message| message.role = Role::User);
        }
        messages.push(Message::new(Role::User, MARKS[1]));
        let whole = match template.render(&messages, tools, false) {
            // A template that wants the roles to alternate: the system text gets its frame here.
            Err(_) if self.fallbacks.contains(&Role::System) && system.is_some() => {
                let first = template.render(&messages[1..], tools, false)?;
                let Frame { before, after } = &self.system;
                let rest = first.strip_prefix(&self.start).unwrap_or(&first);
                format!("{}{before}{}{after}{rest}", self.start, MARKS[0])
            }
            outcome => outcome?,
        };
        let end = format!("{}{}{}", self.user.before, MARKS[1], self.user.after);
        let head = whole.strip_suffix(&end).ok_or_else(|| {
            let problem = "the first user message is framed differently when tools are given".to_string();
            TemplateError::Frames { problem }
        })?;
        let mut parts = vec![(true, head.to_string())];
        if let Some(system) = system {
            split_out(&mut parts, MARKS[0], system);
        }
        for tool in tools {
            let text = json::dumps(tool, None);
            split_out(&mut parts, &text, &text);
        }
        parts.retain(|(_, text)| !text.is_empty());
        Ok(Opening { parts })
    }

    /// Token ids of a whole message with its frame.
    ///
    /// # Errors
    /// [`TemplateError::Tokenizer`].
    pub fn encode_message(
        &self,
        tokenizer: &Tokenizer,
        role: Role,
        content: &str,
    ) -> Result<Vec<u32>, TemplateError> {
        let pieces = [Piece::Frame(self.before(role)), Piece::Text(content), Piece::Frame(self.after(role))];
        Ok(tokenizer.encode_pieces(&pieces)?)
    }

    /// Token ids of tool results that follow each other directly, with their frame.
    ///
    /// # Errors
    /// [`TemplateError::Tokenizer`].
    pub fn encode_tool_results(
        &self,
        tokenizer: &Tokenizer,
        results: &[&str],
    ) -> Result<Vec<u32>, TemplateError> {
        let mut pieces = Vec::with_capacity(results.len() * 2 + 1);
        for (index, result) in results.iter().enumerate() {
            let frame = if index == 0 { self.before(Role::Tool) } else { self.between_tools() };
            pieces.extend([Piece::Frame(frame), Piece::Text(result)]);
        }
        if !results.is_empty() {
            pieces.push(Piece::Frame(self.after(Role::Tool)));
        }
        Ok(tokenizer.encode_pieces(&pieces)?)
    }

    /// Token ids that make the model answer.
    ///
    /// # Errors
    /// [`TemplateError::Tokenizer`].
    pub fn encode_generation_prompt(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>, TemplateError> {
        Ok(tokenizer.encode_with_specials(&self.generation_prompt)?)
    }

    /// Token ids that close an answer whose last sampled token is `last`: what the frame puts after
    /// an answer, without the token that was already sampled.
    ///
    /// # Errors
    /// [`TemplateError::Tokenizer`].
    pub fn encode_answer_end(
        &self,
        tokenizer: &Tokenizer,
        last: Option<u32>,
    ) -> Result<Vec<u32>, TemplateError> {
        let mut ids = tokenizer.encode_with_specials(self.after(Role::Assistant))?;
        if last.is_some() && ids.first().copied() == last {
            ids.remove(0);
        }
        Ok(ids)
    }
}

/// Cuts the first place of `needle` in the template's own text out and puts `content` there.
fn split_out(parts: &mut Vec<(bool, String)>, needle: &str, content: &str) {
    let place = parts.iter().enumerate().find_map(|(index, (frame, text))| {
        let at = if *frame { text.find(needle) } else { None };
        at.map(|at| (index, text[..at].to_string(), text[at + needle.len()..].to_string()))
    });
    if let Some((index, before, after)) = place {
        parts.splice(index..=index, [(true, before), (false, content.to_string()), (true, after)]);
    }
}

/// What a template inserts between its start and the first user message, if it has the shape of a system message.
fn default_system(bare_user: &str, start: &str, system: &Frame, user: &Frame) -> Option<String> {
    let head = bare_user.strip_suffix(&format!("{}{}{}", user.before, MARKS[1], user.after))?;
    let inside = head.strip_prefix(start)?.strip_prefix(&system.before)?.strip_suffix(&system.after)?;
    Some(inside.to_string())
}

fn not_appending(what: &str, shorter: &str, longer: &str) -> TemplateError {
    let same = shorter.chars().zip(longer.chars()).take_while(|(a, b)| a == b).count();
    TemplateError::Frames { problem: format!("{what} changes the text before it (from character {same} on)") }
}

/// What is learnt about tools: frame of a result, text between two results, frame of a call.
type ToolFrames = (Frame, String, Option<ToolCallFrame>);

/// An answer that is a tool call.
fn probe_call() -> Message {
    let arguments = serde_json::json!({ MARKS[5]: MARKS[6] });
    let mut call = Message::new(Role::Assistant, "");
    call.tool_calls.push(ToolCall { name: MARKS[2].to_string(), arguments });
    call
}

/// Whether a text is the JSON object of [`probe_call`].
fn is_probe_call(text: &str) -> bool {
    let object: serde_json::Value = serde_json::from_str(text).unwrap_or_default();
    object["name"] == MARKS[2] && object["arguments"][MARKS[5]] == MARKS[6]
}

struct Probe<'a> {
    template: &'a ChatTemplate,
}

impl Probe<'_> {
    /// Cuts `text` at `mark`.
    fn cut(&self, text: &str, mark: &str) -> Result<Frame, TemplateError> {
        let problem = || TemplateError::Frames { problem: format!("the content {mark:?} is not rendered") };
        let (before, after) = text.split_once(mark).ok_or_else(problem)?;
        Ok(Frame { before: before.to_string(), after: after.to_string() })
    }

    /// The frame of the last of `messages`, given the rendering of those before it, and the whole rendering.
    fn appended(
        &self,
        shorter: &str,
        messages: &[Message],
        mark: &str,
    ) -> Result<(Frame, String), TemplateError> {
        let longer = self.template.render(messages, &[], false)?;
        let new = longer.strip_prefix(shorter).ok_or_else(|| not_appending(mark, shorter, &longer))?;
        Ok((self.cut(new, mark)?, longer))
    }

    /// Frames of the answer and of the user message that end `talk`, whose rendering before them is `one`.
    ///
    /// Some templates write the last answer differently, with an empty block of reasoning for instance, from the
    /// answers before it. Sessions keep what was sampled, so the frame of an answer that others follow is the one.
    fn answered(&self, one: &str, talk: &[Message], user: &Frame) -> Result<(Frame, Frame), TemplateError> {
        let (assistant, two) = self.appended(one, &talk[..talk.len() - 1], MARKS[2])?;
        let appended = self.appended(&two, talk, MARKS[3]);
        if let Ok((again, _)) = appended {
            return Ok((assistant, again));
        }
        let settled = || {
            let whole = self.template.render(talk, &[], false).ok()?;
            let (before, rest) = whole.strip_prefix(one)?.split_once(MARKS[2])?;
            let (between, after) = rest.split_once(MARKS[3])?;
            let starts = [user.before.as_str(), user.before.strip_prefix(self.template.bos.as_str())?];
            let again = starts.into_iter().find(|start| between.ends_with(start))?;
            let frame = |before: &str, after: &str| Frame { before: before.into(), after: after.into() };
            Some((frame(before, between.strip_suffix(again)?), frame(again, after)))
        };
        // The error of the plain way says best where the template is not one that appends.
        settled().map_or_else(|| appended.map(|(again, _)| (assistant, again)), Ok)
    }

    /// Start text and system frame from the rendering of a lone system message.
    fn system(&self, message: &Message, opening: &str) -> Result<(String, Frame), TemplateError> {
        let mut frame = self.cut(opening, MARKS[0])?;
        let marked = self.template.render_with_bos(MARKS[1], std::slice::from_ref(message), &[], false)?;
        // Only a marked start token tells `bos` at the start from a frame that begins with that text.
        let bos = if marked.starts_with(MARKS[1]) { self.template.bos.as_str() } else { "" };
        if let Some(rest) = frame.before.strip_prefix(bos) {
            frame.before = rest.to_string();
        }
        Ok((bos.to_string(), frame))
    }

    /// Frames of tool calls and results after `talk`, whose rendering is `before`.
    fn tools(
        &self,
        talk: &[Message],
        before: &str,
        generation_prompt: &str,
        assistant: &Frame,
    ) -> Result<Option<ToolFrames>, TemplateError> {
        if !self.template.supports_tools() {
            return Ok(None);
        }
        match self.tools_appended(talk, before, generation_prompt, assistant) {
            Err(error @ TemplateError::Frames { .. }) => {
                self.tools_settled(talk, before, generation_prompt, assistant).map(Some).ok_or(error)
            }
            outcome => outcome,
        }
    }

    /// The same from one rendering of a call with results behind it, for templates that write the last message
    /// differently.
    fn tools_settled(
        &self,
        talk: &[Message],
        before: &str,
        generation_prompt: &str,
        assistant: &Frame,
    ) -> Option<ToolFrames> {
        let mut talk = talk.to_vec();
        talk.extend([probe_call(), Message::new(Role::Tool, MARKS[4]), Message::new(Role::Tool, MARKS[5])]);
        let whole = self.template.render(&talk, &[], false).ok()?;
        let new = whole.strip_prefix(before)?.strip_prefix(generation_prompt)?;
        let (head, rest) = new.split_once(MARKS[4])?;
        let (between, after) = rest.split_once(MARKS[5])?;
        let (open, close) = (head.find('{')?, head.rfind('}')?);
        let ours = is_probe_call(head.get(open..=close)?);
        let (closing, tool_before) = head.get(close + 1..)?.split_once(assistant.after.as_str())?;
        let call = ours.then(|| ToolCallFrame { open: head[..open].to_string(), close: closing.to_string() });
        let tool = Frame { before: tool_before.to_string(), after: after.to_string() };
        Some((tool, between.to_string(), call))
    }

    fn tools_appended(
        &self,
        talk: &[Message],
        before: &str,
        generation_prompt: &str,
        assistant: &Frame,
    ) -> Result<Option<ToolFrames>, TemplateError> {
        let mut talk = talk.to_vec();
        talk.push(probe_call());
        let called = self.template.render(&talk, &[], false)?;
        let new = called.strip_prefix(before).ok_or_else(|| not_appending("a tool call", before, &called))?;
        let body = new.strip_prefix(generation_prompt).and_then(|body| body.strip_suffix(&assistant.after));
        let tool_call = body.and_then(|body| {
            let (open, close) = (body.find('{')?, body.rfind('}')?);
            let ours = is_probe_call(body.get(open..=close)?);
            let text = |range: &str| range.to_string();
            ours.then(|| ToolCallFrame { open: text(&body[..open]), close: text(&body[close + 1..]) })
        });
        talk.push(Message::new(Role::Tool, MARKS[4]));
        let (tool, _) = self.appended(&called, &talk, MARKS[4])?;
        talk.push(Message::new(Role::Tool, MARKS[5]));
        let both = self.template.render(&talk, &[], false)?;
        let between = both.split_once(MARKS[4]).and_then(|(_, rest)| rest.split_once(MARKS[5]));
        let (between, _) = between.ok_or_else(|| TemplateError::Frames {
            problem: "a second tool result is not rendered".to_string(),
        })?;
        Ok(Some((tool, between.to_string(), tool_call)))
    }
}
