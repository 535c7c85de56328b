//! What of a conversation is new to a session. A client that names a session may send only what is new,
//! or, as stock clients do, the whole conversation again: then the part the session already holds must
//! match, and only the rest is appended. A history is never rewritten.

use axum::http::StatusCode;

use super::request::{Conversation, Said};
use crate::api::problem::Problem;
use crate::session::spec::{Role, SegmentKind};
use crate::session::view::SegmentView;

/// The messages a session holds after its instructions, as a chat client knows them: without tool calls,
/// results and reasoning.
pub(super) fn spoken(segments: &[SegmentView]) -> Vec<Said> {
    let role = |kind| match kind {
        SegmentKind::System => Some(Role::System),
        SegmentKind::User => Some(Role::User),
        SegmentKind::Answer => Some(Role::Assistant),
        _ => None,
    };
    segments
        .iter()
        .skip_while(|segment| segment.kind == SegmentKind::System)
        .filter_map(|segment| Some(Said { role: role(segment.kind)?, text: segment.text.clone() }))
        .collect()
}

/// The messages of `conversation` that follow what the session `held`; the last one, its input, is new
/// in any case.
///
/// A conversation with an answer of the assistant in it is taken as the whole history, one without as
/// new messages only.
///
/// # Errors
/// `history_mismatch` where the conversation contradicts the session.
pub(super) fn unseen(
    held: &[Said],
    instructions: Option<&str>,
    conversation: &Conversation,
) -> Result<Vec<Said>, Problem> {
    if let Some(given) = conversation.instructions.as_deref()
        && !held.is_empty()
        && instructions.is_none_or(|instructions| !same(instructions, given))
    {
        return Err(mismatch("the system message differs from the session's instructions"));
    }
    let before = &conversation.before;
    if held.is_empty() || !before.iter().any(|message| message.role == Role::Assistant) {
        return Ok(before.clone());
    }
    for (place, message) in held.iter().enumerate() {
        match before.get(place) {
            Some(given) if given.role == message.role && same(&given.text, &message.text) => {}
            Some(_) => return Err(mismatch(&format!("message {} differs from the session's", place + 1))),
            None => {
                let counts = format!(
                    "{} messages were sent before the last one, the session holds {}",
                    before.len(),
                    held.len()
                );
                return Err(mismatch(&counts));
            }
        }
    }
    Ok(before[held.len()..].to_vec())
}

/// Clients trim the ends of texts.
fn same(one: &str, other: &str) -> bool {
    one.trim() == other.trim()
}

fn mismatch(what: &str) -> Problem {
    let detail = format!(
        "the messages do not continue the session: {what}; send only the new ones, or name another session"
    );
    Problem::new(StatusCode::CONFLICT, "history_mismatch", detail).about("messages")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(text: &str) -> Said {
        Said { role: Role::User, text: text.to_owned() }
    }

    fn assistant(text: &str) -> Said {
        Said { role: Role::Assistant, text: text.to_owned() }
    }

    fn conversation(before: Vec<Said>) -> Conversation {
        Conversation { instructions: None, before, input: "next".to_owned() }
    }

    #[test]
    fn a_whole_conversation_adds_nothing_but_its_end() {
        let held = [user("a"), assistant(" b\n")];
        assert_eq!(unseen(&held, None, &conversation(vec![user("a"), assistant("b")])).unwrap(), []);
        let longer = conversation(vec![user("a"), assistant("b"), user("c"), assistant("d")]);
        assert_eq!(unseen(&held, None, &longer).unwrap(), [user("c"), assistant("d")]);
    }

    #[test]
    fn new_messages_alone_are_appended() {
        let held = [user("a"), assistant("b")];
        assert_eq!(unseen(&held, None, &conversation(vec![])).unwrap(), []);
        assert_eq!(unseen(&held, None, &conversation(vec![user("c")])).unwrap(), [user("c")]);
    }

    #[test]
    fn an_empty_session_takes_everything() {
        let all = vec![user("a"), assistant("b")];
        assert_eq!(unseen(&[], None, &conversation(all.clone())).unwrap(), all);
    }

    #[test]
    fn contradictions_are_refused() {
        let held = [user("a"), assistant("b")];
        for before in [vec![user("a"), assistant("x")], vec![assistant("b")], vec![user("x"), assistant("b")]]
        {
            assert_eq!(unseen(&held, None, &conversation(before)).unwrap_err().code, "history_mismatch");
        }
        let mut other = conversation(vec![]);
        other.instructions = Some("be brief".to_owned());
        assert_eq!(unseen(&held, Some("be long"), &other).unwrap_err().code, "history_mismatch");
        assert!(unseen(&held, Some("be brief "), &other).is_ok());
    }
}
