"""`manage.py image`: upload, list and remove the images that devices are programmed with."""

from cyborgweb.management.operator_verbs import VerbsCommand


class Command(VerbsCommand):
    """The verbs for images."""

    noun = "image"
    help = """Upload, list and remove the images that devices are programmed with.

    Devices can be programmed with these images, and with images in Glance, by their ids; those are copied when needed.

    \b
    manage.py image upload shell.bin --property accel:function_id=AFU-1
    manage.py command program DEVICE --image IMAGE --wait
    """
