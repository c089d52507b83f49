{{- define "tocsin.labels" -}}
app.kubernetes.io/name: tocsin
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* A pod, with the rights of the service account that `.` names, or without any. */}}
{{- define "tocsin.pod" -}}
{{- with . -}}
serviceAccountName: {{ . }}
{{ end -}}
automountServiceAccountToken: {{ not (empty .) }}
terminationGracePeriodSeconds: 40
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "tocsin.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "tocsin.mounts" -}}
- {name: config, mountPath: /etc/tocsin, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- range .Values.secrets }}
- {name: secret-{{ . }}, mountPath: /run/secrets/{{ . }}, readOnly: true}
{{- end }}
{{- end }}

{{- define "tocsin.volumes" -}}
- {name: config, configMap: {name: {{ .Release.Name }}-config}}
- {name: tmp, emptyDir: {}}
{{- range .Values.secrets }}
- {name: secret-{{ . }}, secret: {secretName: {{ . }}, defaultMode: 0440}}
{{- end }}
{{- end }}

{{/* Where `store` in the configuration is: its short or its long form. */}}
{{- define "tocsin.store" -}}
{{- $store := .Values.config.store -}}
{{- if kindIs "map" $store }}{{ $store.url | default "" }}{{ else }}{{ $store | default "" }}{{ end }}
{{- end }}

{{/* A pod that uses the store. A volume for one node keeps its pods on that node. */}}
{{- define "tocsin.store.pod" -}}
{{- with .Values.store.serviceAccount -}}
serviceAccountName: {{ . }}
{{ end }}
{{- if and (hasPrefix "/" (include "tocsin.store" .)) (eq .Values.store.volume.accessMode "ReadWriteOnce") -}}
affinity:
  podAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels: {app.kubernetes.io/instance: {{ .Release.Name }}, tocsin/store: volume}
{{- end }}
{{- end }}

{{- define "tocsin.store.environment" -}}
{{- with .Values.store.environment -}}
envFrom: [{secretRef: {name: {{ . }}}}]
{{- end }}
{{- end }}

{{- define "tocsin.store.volume" -}}
- name: store
  persistentVolumeClaim: {claimName: {{ .Values.store.volume.claim | default (printf "%s-store" .Release.Name) }}}
{{- end }}

{{- define "tocsin.probes" -}}
ports: [{name: http, containerPort: 9464}]
# Ready means: it has its partitions and has caught up with their state.
readinessProbe: {httpGet: {path: /readyz, port: http}, periodSeconds: 10}
livenessProbe: {httpGet: {path: /healthz, port: http}, periodSeconds: 20, failureThreshold: 6}
{{- end }}
