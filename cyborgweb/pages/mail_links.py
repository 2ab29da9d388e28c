"""The pages behind the links in mails, on which a recipient confirms an address or ends the mails without a login."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_http_methods

from cyborgweb.auth import read_only
from cyborgweb.notify import subscriptions
from cyborgweb.notify.mail_links import LinkAction, read_token

TITLES = {LinkAction.CONFIRM: "Confirm this address", LinkAction.END: "End these mails"}
INVALID = "This link is not valid, or it has expired. The owner of the subscription can send a new one."

READ_ONLY = "This cannot be done now, because nothing can be changed for a time. Try again later."


@csrf_exempt
@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def show_mail_link(request: HttpRequest, action: str, token: str) -> HttpResponse:
    """Show what the link does, with a button; do it only on POST, because programs that scan mails follow links.

    The signed link is the permission, and no session is read, so a CSRF token would protect nothing: mail programs post
    to the link that ends the mails by themselves (RFC 8058). Answers 404 to a link that is not valid.

    While everything is read only, the link that confirms an address is answered with 503, without the reason, which is
    for users only. The one that ends the mails works, because jobs go on sending, and mail programs do not post again.
    """
    link_action = LinkAction(action)
    page = {"title": TITLES[link_action], "action": action, "sentence": INVALID, "asks": False}
    link = read_token(link_action, token)
    if link is None:
        return render(request, "cyborgweb/pages/mail_link.html", page, status=404)
    if request.method != "POST":
        shown = page | {"asks": True, "address": link[1], "sentence": ""}
        return render(request, "cyborgweb/pages/mail_link.html", shown)
    if link_action == LinkAction.CONFIRM and read_only.get_maintenance():
        refused = page | {"sentence": READ_ONLY}
        response = render(request, "cyborgweb/pages/mail_link.html", refused, status=503)
        response["Retry-After"] = str(read_only.RETRY_S)
        return response
    act = subscriptions.confirm_address if link_action == LinkAction.CONFIRM else subscriptions.end_mails
    return render(request, "cyborgweb/pages/mail_link.html", page | {"sentence": act(*link)})
