//! Images that clients send: where their bytes come from, and what becomes of them for a model that reads text alone.

use crate::error::ApiError;
use crate::model::ServedModel;
use crate::protocol::reading::Reading;
use crate::protocol::sent::{INDEX, ImageSource, SentImage};
use crate::protocol::text::words;
use nq_answers::Image;
use nq_runtime::Message;
use nq_runtime::chat_template::image_part;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use ureq::config::Config;
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{DefaultConnector, NextTimeout};

/// Most images of a request.
const MOST_IMAGES: usize = 100;
/// Most pixels of all images of a request.
const MOST_PIXELS: u64 = 1 << 28;
/// Tokens of an image of which a client asks for low detail: 512 by 512 pixels, as at OpenAI.
const LOW_DETAIL: u64 = 256;
/// Time in which an image is fetched at most.
const FETCH_TIME: Duration = Duration::from_secs(10);

/// An image that the model sees.
#[derive(Clone, Debug)]
pub struct SeenImage {
    /// Its part of the request.
    pub place: String,
    /// The image.
    pub image: Image,
}

/// The images in `messages`, which are those that were sent, in their order. For a model that reads text alone, words
/// take their places in tools' results.
///
/// # Errors
/// An image that the model cannot see, that cannot be fetched or that exceeds a limit, by its place.
pub(crate) fn seen(
    model: &ServedModel,
    messages: &mut [Message],
    reading: &Reading,
) -> Result<Vec<SeenImage>, ApiError> {
    let sent = in_order(reading.take_images(), messages);
    let Some(sight) = model.sight() else {
        if let Some(asked) = sent.iter().find(|image| !image.in_result) {
            let why = nq_answers::Error::Blind(model.name().to_owned());
            let why = format!("{why}; found {:?}", asked.kind);
            return Err(ApiError::unsupported(&asked.place, &why));
        }
        sent.iter()
            .for_each(|image| reading.left_out(&image.place, &image.kind));
        messages.iter_mut().for_each(without_images);
        return Ok(Vec::new());
    };
    if sent.len() > MOST_IMAGES {
        let what = format!(
            "expected at most {MOST_IMAGES} images, found {}",
            sent.len()
        );
        return Err(ApiError::field(&sent[MOST_IMAGES].place, what));
    }
    let (mut all, mut pixels) = (Vec::with_capacity(sent.len()), 0);
    for SentImage {
        place,
        source,
        low_detail,
        ..
    } in sent
    {
        let refused = |e: String| ApiError::field(&place, e);
        let bytes = match source {
            ImageSource::Bytes(bytes) => bytes,
            ImageSource::Url(url) => {
                let most = sight.options().limits.bytes;
                fetch(&url, &reading.rules.image_hosts, most).map_err(refused)?
            }
        };
        let image = sight.image(bytes, low_detail.then_some(LOW_DETAIL));
        let image = image.map_err(|e| refused(e.to_string()))?;
        pixels += image.pixels();
        if pixels > MOST_PIXELS {
            let what = format!("expected at most {MOST_PIXELS} pixels in all images");
            return Err(refused(what));
        }
        all.push(SeenImage { place, image });
    }
    Ok(all)
}

/// Images in the order of the messages, whose parts are then those of templates: Anthropic's turns are taken apart.
fn in_order(sent: Vec<SentImage>, messages: &mut [Message]) -> Vec<SentImage> {
    let mut sent: Vec<Option<SentImage>> = sent.into_iter().map(Some).collect();
    let mut ordered = Vec::with_capacity(sent.len());
    let lists = messages.iter_mut().filter_map(|m| m.content.as_array_mut());
    for part in lists.flatten() {
        let index = part[INDEX].as_u64().and_then(|i| usize::try_from(i).ok());
        if let Some(image) = index.and_then(|i| sent.get_mut(i)?.take()) {
            ordered.push(image);
            *part = image_part();
        }
    }
    ordered
}

/// Puts words in place of images.
fn without_images(message: &mut Message) {
    let Some(parts) = message
        .content
        .as_array_mut()
        .filter(|_| message.role == "tool")
    else {
        return;
    };
    let texts: Vec<String> = parts
        .iter()
        .map(|part| match part == &image_part() {
            true => words("image"),
            false => part["text"].as_str().unwrap_or_default().to_owned(),
        })
        .collect();
    message.content = texts.join("\n").into();
}

/// The bytes at an address, if its host is one of `hosts` and public. Its name is resolved once: the connection goes to
/// the address that was checked. Redirects are not followed, proxies are not asked.
fn fetch(url: &str, hosts: &[String], most: usize) -> Result<Arc<[u8]>, String> {
    let uri: ureq::http::Uri = url.parse().map_err(|_| "expected a URL".to_owned())?;
    let host = uri.host().unwrap_or_default().to_ascii_lowercase();
    if !hosts.contains(&host) {
        return Err(format!(
            "the server fetches no images from {host:?}: send a data: URL, or have it started with --image-hosts"
        ));
    }
    let config = Config::builder()
        .timeout_global(Some(FETCH_TIME))
        .max_redirects(0)
        .max_redirects_will_error(true)
        .proxy(None)
        .build();
    let connector = DefaultConnector::default();
    let agent = ureq::Agent::with_parts(config, connector, PublicResolver::default());
    let failed = |e: ureq::Error| format!("cannot fetch it from {host}: {e}");
    let mut response = agent.get(uri).call().map_err(failed)?;
    let body = response.body_mut().with_config().limit(most as u64);
    Ok(body.read_to_vec().map_err(failed)?.into())
}

/// Resolves names to addresses that everybody can reach, and no other.
#[derive(Debug, Default)]
struct PublicResolver(DefaultResolver);

impl Resolver for PublicResolver {
    fn resolve(
        &self,
        uri: &ureq::http::Uri,
        config: &Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let found = self.0.resolve(uri, config, timeout)?;
        let mut public = self.empty();
        let addresses = found.iter().filter(|address| is_public(address.ip()));
        addresses.for_each(|address| public.push(*address));
        match public.is_empty() {
            true => Err(ureq::Error::HostNotFound),
            false => Ok(public),
        }
    }
}

/// True for addresses of the public internet.
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => {
            let [a, b, c, _] = v4.octets();
            let special = match a {
                0 | 10 | 127 | 224.. => true,
                100 => (64..128).contains(&b),
                169 => b == 254,
                172 => (16..32).contains(&b),
                192 => b == 168 || (b == 0 && (c == 0 || c == 2)) || (b == 88 && c == 99),
                198 => b == 18 || b == 19 || (b == 51 && c == 100),
                203 => b == 0 && c == 113,
                _ => false,
            };
            !special
        }
        // Global unicast, without documentation, and without those that hold addresses of IPv4.
        IpAddr::V6(v6) => {
            let [a, b, ..] = v6.segments();
            (0x2000..0x4000).contains(&a)
                && a != 0x2002
                && !(a == 0x2001 && (b < 0x200 || b == 0xdb8))
                && a != 0x3fff
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_are_not_public_are_told_apart() {
        for private in [
            "127.0.0.1",
            "10.1.2.3",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.1.1",
            "169.254.169.254",
            "0.0.0.0",
            "100.64.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "192.0.0.8",
            "198.18.0.1",
            "203.0.113.5",
            "::1",
            "::",
            "fe80::1",
            "fc00::1",
            "fd12::1",
            "ff02::1",
            "::ffff:127.0.0.1",
            "::ffff:8.8.8.8",
            "64:ff9b::7f00:1",
            "2002:7f00:1::",
            "2001:db8::1",
            "2001::1",
        ] {
            assert!(!is_public(private.parse().unwrap()), "{private}");
        }
        for public in [
            "8.8.8.8",
            "172.32.0.1",
            "192.169.0.1",
            "100.128.0.1",
            "2606:4700::1111",
            "2a00:1450::1",
        ] {
            assert!(is_public(public.parse().unwrap()), "{public}");
        }
    }

    #[test]
    fn only_listed_hosts_with_public_addresses_are_asked() {
        let hosts = ["127.0.0.1".to_owned(), "localhost".to_owned()];
        let refused = |url: &str| fetch(url, &hosts, 100).unwrap_err();
        for other in [
            "http://example.com/a.png",
            "http://example.com@other/",
            "http://127.0.0.1.nip.io/",
        ] {
            assert!(refused(other).contains("fetches no images from"), "{other}");
        }
        // Listed, but of this machine: no connection is tried.
        for own in [
            "http://127.0.0.1:1/",
            "http://localhost:1/",
            "http://LOCALHOST:1/",
        ] {
            assert!(
                refused(own).contains("host not found"),
                "{own}: {}",
                refused(own)
            );
        }
    }

    #[test]
    fn sources_are_data_and_http_alone() {
        let bytes = |url: &str| match ImageSource::address(url.to_owned(), "url") {
            Ok(ImageSource::Bytes(bytes)) => Ok(bytes.to_vec()),
            Ok(ImageSource::Url(url)) => Err(url),
            Err(e) => Err(e.message),
        };
        assert_eq!(bytes("data:image/png;base64,AAEC"), Ok(vec![0, 1, 2]));
        assert_eq!(bytes("data:;base64,AAE"), Ok(vec![0, 1]));
        assert_eq!(bytes("data:image/png;base64,AA\nEC\n"), Ok(vec![0, 1, 2]));
        assert_eq!(bytes("HTTPS://a/b"), Err("HTTPS://a/b".to_owned()));
        for other in [
            "file:///etc/passwd",
            "/etc/passwd",
            "ftp://a/b",
            "data:image/svg+xml,<svg/>",
            "",
        ] {
            assert!(bytes(other).unwrap_err().starts_with("url: "), "{other}");
        }
    }
}
